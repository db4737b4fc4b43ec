"""Finding the micro-batch before the first step, by trying what is likely to fit.

Covers: a few passes of the real step at growing sizes, on the real first batch, with
their peaks; everything they change is put back, so that the numbers that are trained
are those of a run that tried nothing. Which size is tried is decided by
``oomrun.core.probing``.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tensorflow as tf

from oomrun.core import events as ev
from oomrun.core import probing
from oomrun.core.memory import MemoryModel, Peak
from oomrun.core.recorded import AS_IT_HAPPENS, IN_ORDER
from oomrun.worker import devices, pool, randomness
from oomrun.worker.engine import keeping, slicing
from oomrun.worker.recordings import Recordings
from oomrun.worker.session import Session
from oomrun.worker.step_graph import StepGraph, Traceable

__all__ = ["Found", "Prober", "TrialStep"]

TRIALS, TRIALS_BY_XLA = 3, 2
#: Of a trial: peaks differ from step to step, but for recorded ones that run in order.
_STEPS, _STEPS_RECORDED = 3, 2


class TrialStep(Traceable, Protocol):
    """A step that can be tried: a Keras model's, or a custom loop's."""

    @property
    def lost(self) -> bool:
        """Whether the last one failed with all that it had been given."""

    def run(self, data: Any, samples: int, micro_batch_size: int) -> Any:
        """Takes it, ``micro_batch_size`` of the ``samples`` rows a pass."""

    def run_in_order(self, *, whole: bool) -> None:
        """From now on runs its operations one at a time."""

    def for_spec(self, change: Callable[[Any], Any]) -> TrialStep:
        """The same for batches of another spec."""

    def for_trials(self) -> TrialStep:
        """The same, or one that may be taken and undone."""


@dataclass(frozen=True, slots=True)
class Found:
    """The size to train with, why, and what a step should need."""

    size: int
    reason: str
    peak: Peak | None


class Prober:
    """Looks for the micro-batch of one model.

    Args:
        session: the training it is part of.
        model: built and compiled, or the objects of a custom loop.
        function: its step.
        beside_bytes: what the steps to come hold beside what is tried: in a group, the
            sums of all workers' gradients.

    Attributes:
        graph: of the step.
        tried: the peaks of all sizes that were tried; None where memory ran out.
        room: how much more than the size that was found, by its recording, would fit.
    """

    def __init__(
        self, session: Session, model: Any, function: TrialStep, beside_bytes: int = 0
    ) -> None:
        self._session, self._model, self._function = session, model, function
        self._plan = session.launch.plan
        self._budget = max(1, session.micro_batches.budget_bytes - beside_bytes)
        self._tried = function.for_trials()
        self._ordered = False
        self._known: MemoryModel | None = None
        self._recordings = Recordings(
            self._plan,
            keeping.variables_of(model),
            beside_bytes=beside_bytes,
            records=self._tried is function and not function.by_xla,
        )
        self.graph = StepGraph(model, function)
        self.tried: dict[int, int | None] = {}
        self.room = math.inf

    def settle(
        self,
        data: Any,
        samples: int,
        may_cut: Callable[[], bool],
        larger: float = 1.0,
        *,
        at_least_one: bool = False,
    ) -> Found | None:
        """Tries sizes on ``data`` until one is found to train with.

        To be called again for a batch of more rows, or of larger ones.

        Args:
            data: an eager batch.
            samples: its rows.
            may_cut: whether batches can be cut; asked only if they may have to be.
            larger: how much larger its samples are than those of the call before.
            at_least_one: try one also where it surely fits, unless one was measured.

        Returns:
            What was found; None where it is the whole batch anyway, or nothing says
            where to begin.
        """
        sizes = self._session.micro_batches
        rest, batch_bytes = self._at_rest_bytes(), 0
        limit_bytes = pool.limit_bytes()
        by_xla = self._function.by_xla
        # XLA compiles each size, for as long as a minute.
        trials = TRIALS_BY_XLA if by_xla else TRIALS
        if larger > 1:
            self._samples_grew(samples, larger, rest)
        else:
            self.graph.ask(data, samples)
        from_graph, suits = self.graph.guess, self.graph.suits
        arrives_bytes = self._arrives_bytes(data, suits)
        if limit_bytes is not None:
            # The data lie in the same memory. Measured: in some steps of a training
            # there is a batch or two more of them than there was in a trial. What else
            # the headroom is for seldom comes at the same time.
            headroom = max(0, limit_bytes - sizes.budget_bytes)
            batch_bytes = max(0, arrives_bytes - headroom // 2)
        self._recordings.buffers = self.graph.buffers
        if not from_graph and not sizes.measured:
            return None  # trials from nothing would end far below what fits
        self._recordings.spread = IN_ORDER if suits else AS_IT_HAPPENS
        self._recordings.batch_bytes = arrives_bytes
        remembered = bool(sizes.measured)
        unproven: set[int] = set()  # sizes that no step in parts was taken at
        while True:
            known = MemoryModel(
                state_bytes=rest,
                measured=dict(sizes.measured),
                static=from_graph,
                # What another trace of the step took, this one need not. XLA gives a
                # step its memory in one piece, which is always the same.
                in_order=by_xla or (suits and self._tried is self._function),
                loops=self.graph.loops,
                recorded=self._recordings.known(
                    samples, sizes.recorded, sizes.measured
                ),
            )
            self._known = known
            # What was recorded is with the data, as far as they are read ahead.
            spare = 0 if self._recordings.best else batch_bytes
            asked = probing.Asked(
                samples=samples,
                at_most=sizes.size(samples),
                budget_bytes=self._budget,
                spare_bytes=spare,
                trials_left=trials,
                failed=sizes.failed,
                crowded=self._recordings.crowded,
                remembered=remembered,
                even=by_xla,
            )
            step = probing.next_step(known, asked)
            if by_xla and isinstance(step, probing.Try) and step.size == samples:
                # Where a whole step by XLA runs out of memory nothing can be put back.
                trials = 0
                continue
            if (
                at_least_one
                and isinstance(step, probing.Settled)
                and not known.measured
            ):
                step = probing.Try(size=step.size)
            roomy = isinstance(step, probing.Settled) and step.surely
            self._ordered = suits and not roomy
            if self._ordered:
                self._function.run_in_order(whole=True)
            size = 1 if isinstance(step, probing.NothingFits) else step.size
            if not isinstance(step, probing.Try) and not (
                size in unproven and size < samples
            ):
                if size < samples and not may_cut():
                    return None
                needs = known.recorded.predict(size)
                self.room = self._budget / needs[1] if needs else math.inf
                counted = known.counted(size, limit_bytes)
                return Found(size, step.reason, _with_data(counted, spare, limit_bytes))
            if isinstance(step, probing.Try):
                size = self._recordings.size_to_try(size, samples)
            trials -= 1
            likely = known.predict(samples)
            perhaps = likely is not None and likely.bytes <= self._budget
            if perhaps and size < samples and not sizes.measured and not by_xla:
                # A small batch, taken whole, says what a part of that size will need,
                # and whether there will have to be parts at all.
                small = self._tried.for_spec(slicing.with_any_rows)
                few, more = slicing.cut(data, 0, size), 2 * self._gradient_bytes()
                self.attempt(few, size, size, function=small, more=more)
                unproven.add(size)
            elif size == samples or may_cut():
                self.attempt(data, samples, size)
                unproven.discard(size)
            else:
                return None

    def elsewhere(self, samples: int, at_most: int, budget_bytes: int) -> int:
        """The size for another device, from what was found out on this one.

        A step needs no more there: the optimizer's memory is here.

        Args:
            samples: rows of the batch.
            at_most: the size's upper bound.
            budget_bytes: the other device's.
        """
        if self._known is None:
            return at_most
        asked = probing.Asked(
            samples=samples,
            at_most=at_most,
            budget_bytes=budget_bytes,
            trials_left=0,
            even=self._function.by_xla,
        )
        recorded = self._known.recorded
        if recorded.pool_bytes is not None:  # of this device
            less = max(0, self._budget - budget_bytes)
            pool_bytes = max(1, recorded.pool_bytes - less)
            recorded = replace(recorded, pool_bytes=pool_bytes)
        step = probing.next_step(replace(self._known, recorded=recorded), asked)
        return 1 if isinstance(step, probing.NothingFits) else step.size

    def _samples_grew(self, samples: int, larger: float, rest: int) -> None:
        """Longer sequences, larger images: a guess instead of what is known."""
        sizes = self._session.micro_batches
        known = (
            int((peak - rest) * samples / size) for size, peak in sizes.measured.items()
        )
        self.graph.samples_grew(samples, max(known, default=0), larger)
        self._recordings.end()
        sizes.samples_grew()

    def _arrives_bytes(self, data: Any, in_order: bool) -> int:
        """Of the batch that is read while a step runs; 0: it was read before.

        Where operations run as it happens, as much is left to chance in the step.
        """
        call = self._session.fit
        waits = in_order and call is not None and call.waits_for_data
        return 0 if waits else int(slicing.bytes_of(data))

    def _at_rest_bytes(self) -> int:
        """In use before a step, with the gradients that every step holds."""
        memory, *_ = devices.read_memory(self._plan)
        return (memory.in_use_bytes or 0) + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return keeping.bytes_of(self._model.trainable_variables)

    def attempt(
        self,
        data: Any,
        rows: int,
        size: int,
        *,
        function: TrialStep | None = None,
        more: int = 0,
    ) -> None:
        """Takes a few steps at ``size``, and notes their peak or that they failed.

        Args:
            data: a batch.
            rows: its rows.
            size: samples a pass.
            function: takes the steps; None: the one that all batches are tried with.
            more: bytes that the step to come will need beside those that are measured.
        """
        sizes, function = self._session.micro_batches, function or self._tried
        if self._ordered:
            function.run_in_order(whole=True)
        began, message, pool_bytes = time.perf_counter(), "", None
        steps = _STEPS_RECORDED if self._recordings.exact else _STEPS

        def take() -> None:
            _wait_for(function.run(data, rows, size))

        devices.reset_peaks(self._plan)
        drawn = randomness.save()
        with keeping.left_as_it_was(keeping.variables_of(self._model)):
            try:
                for _ in range(steps - 1):
                    take()
                # The first ones make what the later ones find.
                pool_bytes = self._recordings.take(take, rows, size, more)
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
                if function.lost:
                    # Not even what it changed can be put back.
                    self._tell(size, None, began, message, steps=steps)
                    sizes.report(size, "gradients", message, recovery="restart")
                    self._session.leave_for_restart()
        randomness.restore(drawn)
        memory, *_ = devices.read_memory(self._plan)
        devices.reset_peaks(self._plan)
        peak = None if message else memory.peak_bytes
        if peak is None:
            sizes.note_failed(size)
        else:
            peak += more
            sizes.note_peak(size, peak)
            if pool_bytes is not None:
                sizes.note_pool(size, pool_bytes)
        self.tried[size] = peak
        self._tell(size, peak, began, message, steps=steps, pool_bytes=pool_bytes)

    def _tell(
        self,
        size: int,
        peak: int | None,
        began: float,
        message: str,
        *,
        steps: int,
        pool_bytes: int | None = None,
    ) -> None:
        call = self._session.fit
        self._session.channel.send(
            ev.Probed(
                at=time.time(),
                attempt=self._session.launch.attempt,
                fit=call.number if call else 0,
                micro_batch_size=size,
                steps=steps,
                peak_bytes=peak,
                seconds=time.perf_counter() - began,
                message=message[:500],
                pool_bytes=pool_bytes,
            )
        )


def _with_data(
    peak: Peak | None, batch_bytes: int, limit_bytes: int | None
) -> Peak | None:
    """``peak`` where a batch more of the data may be in memory."""
    if peak is None:
        return None
    bound = sys.maxsize if limit_bytes is None else limit_bytes
    return Peak(
        bytes=min(bound, peak.bytes + batch_bytes // 2),
        high_bytes=min(bound, peak.high_bytes + batch_bytes),
    )


def _wait_for(logs: Any) -> None:
    """An accelerator may still be at work when a step has returned."""
    for value in tf.nest.flatten(logs):
        if isinstance(value, tf.Tensor):
            value.numpy()
