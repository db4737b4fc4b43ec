"""Finding the micro-batch before the first step, by trying what is likely to fit.

Covers: a few passes of the real step at growing sizes, on the real first batch, with
their peaks; everything they change is put back, so that the numbers that are trained
are those of a run that tried nothing. Which size is tried is decided by
``oomrun.core.probing``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from oomrun.core import events as ev
from oomrun.core import probing
from oomrun.core.memory import MemoryModel, Peak
from oomrun.worker import devices, pool, randomness
from oomrun.worker.engine import executor, keeping, slicing, static
from oomrun.worker.session import Session

__all__ = ["Found", "Prober", "TrialStep"]

TRIALS, TRIALS_BY_XLA = 3, 2
_STEPS = 3


class TrialStep(Protocol):
    """A step that can be tried: a Keras model's, or a custom loop's."""

    @property
    def by_xla(self) -> bool:
        """Whether XLA compiles it."""

    @property
    def lost(self) -> bool:
        """Whether the last one failed with all that it had been given."""

    def run(self, data: Any, samples: int, micro_batch_size: int) -> Any:
        """Takes it, ``micro_batch_size`` of the ``samples`` rows a pass."""

    def run_in_order(self, *, whole: bool) -> None:
        """From now on runs its operations one at a time."""

    def graph_function(self) -> Any:
        """Its concrete function for batches of any size; None where there is none."""

    def for_spec(self, change: Callable[[Any], Any]) -> TrialStep:
        """The same for batches of another spec."""

    def for_trials(self) -> TrialStep:
        """The same, or one that may be taken and undone."""

    def without_xla(self) -> TrialStep:
        """The same as XLA is given it."""


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
        graph: what the step's graph says, by rows of a batch.
    """

    def __init__(
        self, session: Session, model: Any, function: TrialStep, beside_bytes: int = 0
    ) -> None:
        self._session, self._model, self._function = session, model, function
        self._plan = session.launch.plan
        self._budget = max(1, session.micro_batches.budget_bytes - beside_bytes)
        self._tried = function.for_trials()
        self._ordered = self._suits = self._loops = False
        self._from_graph: dict[int, int] = {}
        self._graph_step = function
        self._graph_function: Any = None
        self._known: MemoryModel | None = None
        self.graph: dict[int, static.GraphPeak] = {}

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
        if limit_bytes is not None:
            # The data lie in the same memory. Measured: in some steps of a training
            # there is a batch or two more of them than there was in a trial. What else
            # the headroom is for seldom comes at the same time.
            headroom = max(0, limit_bytes - sizes.budget_bytes)
            batch_bytes = max(0, slicing.bytes_of(data) - headroom // 2)
        by_xla = self._function.by_xla
        # XLA compiles each size, for as long as a minute.
        trials = TRIALS_BY_XLA if by_xla else TRIALS
        if larger > 1:
            self._samples_grew(samples, larger, rest)
        else:
            self._ask_graph(data, samples)
        from_graph, suits = self._from_graph, self._suits
        if not from_graph and not sizes.measured:
            return None  # trials from nothing would end far below what fits
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
                loops=self._loops,
            )
            self._known = known
            asked = probing.Asked(
                samples=samples,
                at_most=sizes.size(samples),
                budget_bytes=self._budget,
                spare_bytes=batch_bytes,
                trials_left=trials,
                failed=sizes.failed,
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
                counted = known.counted(size, limit_bytes)
                return Found(
                    size, step.reason, _with_data(counted, batch_bytes, limit_bytes)
                )
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
        step = probing.next_step(self._known, asked)
        return 1 if isinstance(step, probing.NothingFits) else step.size

    def _ask_graph(self, data: Any, samples: int) -> None:
        """The graph's peaks, and whether its operations can be run one at a time."""
        function = self._graph_function = self._graph_for(data)
        if function is None:
            self._from_graph, self._suits = {}, False
            return
        limited = pool.limit_bytes() is not None and not self._function.by_xla
        self._suits = limited and executor.suits(function.graph)
        self._loops = static.has_loops(function.graph)
        self.graph = {}  # of another shape
        self.look_at_graph(data, [samples])
        self._from_graph = {size: peak.bytes for size, peak in self.graph.items()}
        least = static.least_bytes(self._model, samples)
        if least > self._from_graph.get(samples, least):
            # It has not seen the most of it, as with loops.
            self._from_graph, self._loops = {samples: least}, True

    def _graph_for(self, data: Any) -> Any:
        """The graph of a step over batches like ``data``; None where there is none."""
        # One for sequences of any length says nothing of how long they are.
        known = self._function.for_spec(lambda spec: slicing.with_shapes_of(spec, data))
        self._graph_step = known.without_xla()  # its graph needs it to live on
        return self._graph_step.graph_function()

    def look_at_graph(self, data: Any, sizes: Iterable[int]) -> None:
        """Adds what the graph says of batches of so many rows to ``graph``."""
        if self._graph_function is None:
            self._graph_function = self._graph_for(data)
        function = self._graph_function
        missing = [size for size in dict.fromkeys(sizes) if size not in self.graph]
        if function is not None and missing:
            self.graph |= static.peaks(function, data, missing)

    def _samples_grew(self, samples: int, larger: float, rest: int) -> None:
        """Longer sequences, larger images: a first guess instead of what is known.

        As much more as the samples are larger. To trace a graph for each length would
        take seconds; trials will show how far off it is.
        """
        sizes = self._session.micro_batches
        before = max(self._from_graph.values(), default=0)
        for size, peak in sizes.measured.items():
            before = max(before, int((peak - rest) * samples / size))
        self._from_graph = {samples: int(before * larger)} if before else {}
        sizes.samples_grew()

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
        began, message = time.perf_counter(), ""
        devices.reset_peaks(self._plan)
        drawn = randomness.save()
        with keeping.left_as_it_was(keeping.variables_of(self._model)):
            try:
                for _ in range(_STEPS):
                    _wait_for(function.run(data, rows, size))
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
                if function.lost:
                    # Not even what it changed can be put back.
                    self._tell(size, None, began, message)
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
        self._tell(size, peak, began, message)

    def _tell(self, size: int, peak: int | None, began: float, message: str) -> None:
        call = self._session.fit
        self._session.channel.send(
            ev.Probed(
                at=time.time(),
                attempt=self._session.launch.attempt,
                fit=call.number if call else 0,
                micro_batch_size=size,
                steps=_STEPS,
                peak_bytes=peak,
                seconds=time.perf_counter() - began,
                message=message[:500],
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
