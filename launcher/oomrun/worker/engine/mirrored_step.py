"""One optimizer step over a batch, of which several devices do a share each.

Each device adds up the gradients of its rows, in micro-batches of its own size and
weighted as parts of the whole batch (``cutting.py``), on its own copy of the model
(``mirror.py``). The sums go to the first device, whose optimizer takes the step; the
copies follow before the next one. So nothing is written before the gradients of all
devices are there: a device that runs out of memory until then has changed nothing.

The passes of each device are a function of their own, called in a thread of its own, so
that it is known whose memory ran out. Of one function for all devices TensorFlow may
report that one waited in vain for another, instead of what happened to that (measured).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from oomrun.core.shares import Part
from oomrun.worker import pool
from oomrun.worker.engine import cutting, executor, joining, slicing
from oomrun.worker.engine.applying import Apply
from oomrun.worker.engine.mirror import Mirror, placed
from oomrun.worker.engine.returning import Logs
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import Snapshot
from oomrun.worker.engine.step import StepFunction

__all__ = ["MirroredStep"]

# Where the batch is, before a share of it goes to a device.
_HOST = "CPU:0"


@dataclass(frozen=True)
class _Rows(cutting.Batch):
    """A device's rows of a batch, cut into parts.

    Attributes:
        own: these rows.
        first: the first of them, as a row of the batch.
        rows: how many the batch has.
    """

    own: Any
    first: tf.Tensor
    rows: tf.Tensor

    @property
    def samples(self) -> tf.Tensor:
        return self.rows

    @property
    def cut_samples(self) -> tf.Tensor:
        return slicing.rows(self.own)

    def start(self, index: tf.Tensor) -> tf.Tensor:
        return self.first + index * self.micro_batch_size

    def part(self, index: tf.Tensor) -> Any:
        start = index * self.micro_batch_size
        stop = tf.minimum(start + self.micro_batch_size, slicing.rows(self.own))
        return slicing.take(self.own, start, stop)

    def whole(self) -> cutting.Batch:
        return cutting.Batch(self.data, self.micro_batch_size)


@dataclass
class _Gathered:
    """What a device's passes have come to."""

    gradients: list[Any]
    last: Logs
    mean: Logs


class MirroredStep(StepFunction):
    """The compiled steps of one model, with one that several devices take.

    ``run`` still is the first device's own.

    Args:
        model: as for ``StepFunction``; all of its variables are made by the first step.
        devices: TensorFlow's names; the model's variables are on the first.

    Attributes:
        exhausted: the devices whose memory ran out in the last step, by their places,
            with TensorFlow's text; none where it cannot be said.
    """

    def __init__(self, model: Any, devices: Sequence[str]) -> None:
        super().__init__(model)
        self.exhausted: dict[int, str] = {}
        self._devices = list(devices)
        self._mirrors: list[Mirror] = []
        self._snapshots = [self.snapshot]
        self._calls: list[Apply] = []
        self._form: Any = None
        self._needs_all = False
        self._threads = ThreadPoolExecutor(len(devices), "oomrun-device")
        self._begins = self._compiled(self._begin_all)
        self._passes: dict[tuple[int, int], Callable[..., Any]] = {}
        self._ends: dict[int, Callable[..., Any]] = {}

    def run_mirrored(
        self, data: Any, parts: Sequence[Part], sizes: Sequence[int]
    ) -> Logs:
        """One optimizer step over ``data``.

        Args:
            data: the whole batch.
            parts: what each device does of it.
            sizes: rows of each device's pass, at least 1.

        Returns:
            The logs that the model's ``train_step`` would return for the whole batch.

        Raises:
            tf.errors.ResourceExhaustedError: see ``applying``, ``snapshot`` and
                ``exhausted``.
        """
        self._at_once, self.exhausted = False, {}
        if not self._mirrors:
            self._make_mirrors(data)
        if self._how_to_cut.suits_order and pool.limit_bytes() is not None:
            self.run_in_order(whole=False)
        # The model's own state first: there may be no room for the copies of it.
        self._begin()
        before = self._begins()
        samples = slicing.batch_size(data)
        rows = [
            self._rows(data, samples, part, size)
            for part, size in zip(parts, sizes, strict=True)
        ]
        weights = [cutting.Weights() for _ in self._mirrors]
        last = max(0, len(self._calls) - 1)
        for number in range(last + 1):
            found = self._gather(rows, number, weights)
            sums = [gathered.gradients for gathered in found]
            if number < last:
                self._between(number, sums, weights)
        returned = [(gathered.last, gathered.mean) for gathered in found]
        shares = tf.constant([part.share for part in parts])
        end = self._end(last, self._end_all)
        logs: Logs = end(sums, before, returned, shares)
        return logs

    def run_in_order(self, *, whole: bool) -> None:
        """See ``StepFunction``."""
        before = self._in_order
        super().run_in_order(whole=whole)
        if self._in_order and not before:
            self._passes.clear()

    def _make_mirrors(self, data: Any) -> None:
        found = cutting.Cutter(self._model, self.snapshot).scout(data)
        self._calls, self._form = found.applies, found.returned
        self._needs_all = found.divisors.needed
        self._mirrors = [
            Mirror(self._model, device, first=index == 0)
            for index, device in enumerate(self._devices)
        ]
        for mirror in self._mirrors[1:]:
            with mirror.in_use():
                self._snapshots.append(Snapshot(self._model))

    # -- the parts of a step, each compiled --------------------------------------------

    def _begin_all(self) -> list[tf.Tensor]:
        """Makes the copies current; gives what metrics hold before the step."""
        for mirror in self._mirrors:
            mirror.refresh()
        others = zip(self._mirrors[1:], self._snapshots[1:], strict=True)
        for mirror, snapshot in others:
            with placed(mirror.device):
                snapshot.take()
        return [tf.identity(v.value) for v in self._model.metrics_variables]

    def _rows(self, data: Any, samples: int, part: Part, size: int) -> tuple[Any, ...]:
        """What a device is told of the batch: its rows, and all where it needs them."""
        with tf.device(_HOST):
            own = slicing.cut(data, part.start, part.start + part.share)
            numbers = [tf.constant(n) for n in (part.start, samples, size)]
        return (own, data if self._needs_all else None, *numbers)

    def _gather(
        self,
        rows: Sequence[tuple[Any, ...]],
        number: int,
        weights: Sequence[cutting.Weights],
    ) -> list[_Gathered]:
        """Makes the passes of all devices, beside each other.

        Raises:
            tf.errors.ResourceExhaustedError: of one of ``exhausted``.
        """
        calls = [
            self._prepared(index, number, (*rows[index], own.values()))
            for index, own in enumerate(weights)
        ]
        if self._model.run_eagerly:
            done = [_finished(call) for call in calls]
        else:
            running = [self._threads.submit(_finished, call) for call in calls]
            done = [one.result() for one in running]
        failed = {i: one for i, one in enumerate(done) if isinstance(one, Exception)}
        for index, error in failed.items():
            if not _may_be_memory(index, int(rows[index][-1]), error):
                raise error
        self.exhausted = {index: str(error) for index, error in failed.items()}
        for error in failed.values():
            raise tf.errors.ResourceExhaustedError(None, None, str(error)) from error
        return [_Gathered(*one) for one in done]

    def _prepared(
        self, index: int, number: int, given: tuple[Any, ...]
    ) -> Callable[[], Any]:
        """The passes of one device, traced, to be made in any thread."""
        mirror = self._mirrors[index]
        key = (index, number)
        if key not in self._passes:
            passes = functools.partial(self._pass_over, index, number)
            self._passes[key] = self._compiled(passes)
            self._trace_passes(index, self._passes[key], given)
        function: Any = self._passes[key]
        if self._model.run_eagerly:
            return functools.partial(function, *given)
        with mirror.in_use(), self._flags.as_they_were():
            traced = function.get_concrete_function(*given)

        def call() -> Any:
            with tf.device(mirror.device):
                return traced(*given)

        return call

    def _trace_passes(self, index: int, function: Any, given: tuple[Any, ...]) -> None:
        """Traces for batches of all sizes, as ``StepFunction`` does."""
        if self._model.run_eagerly or self._spec is None:
            return
        _, data, *rest = given
        specs = [self._spec, None if data is None else self._spec]
        rest = keras.tree.map_structure(tf.type_spec_from_value, rest)
        # Batches that are unlike their spec are traced when they come.
        refused = contextlib.suppress(TypeError, ValueError)
        with refused, self._flags.as_they_were(), self._mirrors[index].in_use():
            function.get_concrete_function(*specs, *rest)

    def _pass_over(
        self,
        index: int,
        number: int,
        own: Any,
        data: Any,
        first: tf.Tensor,
        samples: tf.Tensor,
        size: tf.Tensor,
        weights: Any,
    ) -> Any:
        cutter = cutting.Cutter(
            self._model,
            self._snapshots[index],
            compiled=executor.ordered if self._in_order else self._by_xla,
            sums=self._how_to_cut.separability is Separability.SUM,
        )
        batch = _Rows(own if data is None else data, size, own, first, samples)
        variables = [call.variables for call in self._calls]
        with self._mirrors[index].in_use():
            return cutter.passes(batch, number, cutting.Weights.of(variables, weights))

    def _between(
        self,
        number: int,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[cutting.Weights],
    ) -> None:
        """An optimizer's turn in a step that has others after it."""
        call = self._calls[number]
        for mirror, snapshot, own in zip(
            self._mirrors, self._snapshots, weights, strict=True
        ):
            # The next passes begin as these did.
            snapshot.restore()
            with mirror.in_use():
                own.note_old(call.variables)
        self._end(number, functools.partial(self._end_of, number))(gradients)
        for mirror, own in zip(self._mirrors, weights, strict=True):
            mirror.refresh(call.variables)
            with mirror.in_use():
                own.note_new(number, call.variables)

    def _end(self, number: int, end: Callable[..., Any]) -> Callable[..., Any]:
        if number not in self._ends:
            self._ends[number] = self._compiled(end)
        return self._ends[number]

    def _end_of(self, number: int, gradients: Sequence[Sequence[Any]]) -> None:
        for call in self._calls[number : number + 1]:
            with placed(self._devices[0]):
                sums = joining.sums(call.gradients, gradients)
            self._apply(call, sums)

    def _end_all(
        self,
        gradients: Sequence[Sequence[Any]],
        before: Sequence[tf.Tensor],
        returned: Sequence[tuple[Logs, Logs]],
        shares: tf.Tensor,
    ) -> Logs:
        self._end_of(max(0, len(self._calls) - 1), gradients)
        weights = tf.cast(shares, tf.float64) / tf.cast(
            tf.reduce_sum(shares), tf.float64
        )
        joining.join_state(
            self._model, self._mirrors, before, tf.unstack(weights, len(self._mirrors))
        )
        return joining.logs(self._model, self._form, returned, shares)


def _may_be_memory(index: int, size: int, error: Exception) -> bool:
    """Whether passes of so many rows failed since their device's memory ran out.

    Of a loop that is not on the first device TensorFlow may tell only that it was
    cancelled, whatever went wrong in it (measured). Smaller passes are tried; where
    it is another thing, they fail as well, and the last of them as it is.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return True
    return index > 0 and size > 1 and isinstance(error, tf.errors.CancelledError)


def _finished(call: Callable[[], Any]) -> Any:
    """What a call gives, or the error that it raises: the others go on all the same."""
    try:
        return call()
    except Exception as error:
        return error
