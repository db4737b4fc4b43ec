"""One optimizer step over a batch, of which several devices do a share each.

Each device adds up the gradients of its rows, in micro-batches of its own size and
weighted as parts of the whole batch (``cutting.py``), on its own copy of the model
(``mirror.py``). The sums go to the first device, whose optimizer takes the step; the
copies follow. So nothing is written before the gradients of all devices are there: a
device that runs out of memory until then has changed nothing.

All is one function of TensorFlow's, which runs on the devices beside each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from oomrun.core.shares import Part
from oomrun.worker import pool
from oomrun.worker.engine import cutting, executor, slicing
from oomrun.worker.engine.applying import Apply
from oomrun.worker.engine.mirror import Mirror, placed
from oomrun.worker.engine.returning import Returned, flat, in_form
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import Snapshot, mutable_variables
from oomrun.worker.engine.step import Logs, StepFunction

__all__ = ["MirroredStep"]

# Where the batch is, before a share of it goes to a device.
_HOST = "CPU:0"


@dataclass(frozen=True)
class _Rows(cutting.Batch):
    """A device's rows of a batch, cut into parts.

    Attributes:
        own: these rows.
        first: the first of them, as a row of the batch.
        share: how many they are.
    """

    own: Any
    first: tf.Tensor
    share: tf.Tensor

    @property
    def passes(self) -> tf.Tensor:
        return -(-self.share // self.micro_batch_size)

    def start(self, index: tf.Tensor) -> tf.Tensor:
        return self.first + index * self.micro_batch_size

    def part(self, index: tf.Tensor) -> Any:
        start = index * self.micro_batch_size
        stop = tf.minimum(start + self.micro_batch_size, self.share)
        return slicing.take(self.own, start, stop)

    def whole(self) -> cutting.Batch:
        return cutting.Batch(self.data, self.micro_batch_size)


class MirroredStep(StepFunction):
    """The compiled steps of one model, with one that several devices take.

    ``run`` still is the first device's own.

    Args:
        model: as for ``StepFunction``; all of its variables are made by the first step.
        devices: TensorFlow's names; the model's variables are on the first.
    """

    def __init__(self, model: Any, devices: Sequence[str]) -> None:
        super().__init__(model)
        self._devices = list(devices)
        self._mirrors: list[Mirror] = []
        self._snapshots = [self.snapshot]
        self._mirrored = self._compiled(self._mirrored_step)

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
            tf.errors.ResourceExhaustedError: see ``applying`` and ``snapshot``.
        """
        self._at_once = False
        if not self._mirrors:
            self._make_mirrors()
        if self._how_to_cut.suits_order and pool.limit_bytes() is not None:
            self.run_in_order(whole=False)
        rows = [
            [part.start, part.share, size]
            for part, size in zip(parts, sizes, strict=True)
        ]
        self._trace("mirrored", self._mirrored, tf.TensorSpec([len(rows), 3], tf.int32))
        logs: Logs = self._mirrored(data, tf.constant(rows, tf.int32))
        return logs

    def _make_mirrors(self) -> None:
        self._mirrors = [
            Mirror(self._model, device, first=index == 0)
            for index, device in enumerate(self._devices)
        ]
        for mirror in self._mirrors[1:]:
            with mirror.in_use():
                self._snapshots.append(Snapshot(self._model))

    def run_in_order(self, *, whole: bool) -> None:
        """See ``StepFunction``."""
        before = self._in_order
        super().run_in_order(whole=whole)
        if self._in_order and not before:
            self._mirrored = self._compiled(self._mirrored_step)
            self._traced.discard("mirrored")

    def _mirrored_step(self, data: Any, rows: tf.Tensor) -> Logs:
        self._line.begin()
        for mirror in self._mirrors:
            mirror.refresh()
        for snapshot in self._snapshots:
            snapshot.take()
        metrics = list(self._model.metrics_variables)
        before = [tf.identity(v.value) for v in metrics]
        returned = self._passes(data, rows)
        samples = tf.cast(slicing.rows(data), tf.float64)
        weights = [
            tf.cast(rows[n, 1], tf.float64) / samples for n in range(len(self._mirrors))
        ]
        self._join_state(metrics, before, weights)
        return self._logs(returned, rows[:, 1])

    def _passes(self, data: Any, rows: tf.Tensor) -> list[Returned]:
        """Makes all passes of all devices, and calls the optimizers."""
        taken = [self._phases(data, rows[n], n) for n in range(len(self._mirrors))]
        returned: list[Returned] = []
        while not returned:
            calls: list[tuple[Apply, bool]] = []
            gradients: list[Sequence[Any]] = []
            for mirror, phases in zip(self._mirrors, taken, strict=True):
                with mirror.in_use():
                    try:
                        call, found, last = next(phases)
                    except StopIteration as ended:
                        returned.append(ended.value)
                    else:
                        calls.append((call, last))
                        gradients.append(found)
            for call, last in calls[:1]:
                self._apply(call, self._summed(call, gradients))
                if not last:
                    for mirror in self._mirrors:
                        mirror.refresh(call.variables)
        return returned

    def _phases(self, data: Any, rows: tf.Tensor, index: int) -> cutting.Phases:
        with placed(_HOST):
            first, share, size = rows[0], rows[1], rows[2]
            own = slicing.take(data, first, first + share)
        cutter = cutting.Cutter(
            self._model,
            self._snapshots[index],
            compiled=executor.ordered if self._in_order else self._by_xla,
            sums=self._how_to_cut.separability is Separability.SUM,
        )
        return cutter.phases(_Rows(data, size, own, first, share))

    def _summed(self, call: Apply, given: Sequence[Sequence[Any]]) -> list[Any]:
        """Each gradient, over all devices, on the first of them."""
        with placed(self._mirrors[0].device):
            return [
                _sum(example, parts)
                for example, *parts in zip(call.gradients, *given, strict=True)
            ]

    def _join_state(
        self,
        metrics: Sequence[Any],
        before: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
    ) -> None:
        """Makes of what the passes have changed on each device one state.

        Metrics hold sums over samples, so the changes add up; of layers' statistics
        (BatchNorm) it is the mean, weighted by samples; a count (random state) is the
        highest.
        """
        known = {id(v): old for v, old in zip(metrics, before, strict=True)}
        others = [v for v in mutable_variables(self._model) if id(v) not in known]
        found: list[list[tf.Tensor]] = []
        for mirror in self._mirrors:
            with mirror.in_use():
                found.append([tf.identity(v.value) for v in (*metrics, *others)])
        first = self._mirrors[0].device
        for variable, *values in zip((*metrics, *others), *found, strict=True):
            dtype = values[0].dtype
            with placed(first):
                if id(variable) in known:
                    old = known[id(variable)]
                    value = old + _add([value - old for value in values])
                elif dtype.is_floating:
                    shares = [tf.cast(weight, dtype) for weight in weights]
                    value = _add(
                        [v * share for v, share in zip(values, shares, strict=True)]
                    )
                elif dtype.is_integer:
                    value = tf.reduce_max(tf.stack(values), 0)
                else:
                    continue
                variable.assign(value)

    def _logs(self, returned: Sequence[Returned], shares: tf.Tensor) -> Logs:
        """As the step of the whole batch returns it."""
        known = flat(self._model.get_metrics_result())
        values = dict(returned[0].last)
        for index, own in enumerate(returned[1:], start=1):
            # The last part of the batch is that of the last device that has any.
            values = {
                name: tf.where(shares[index] > 0, own.last[name], value)
                for name, value in values.items()
            }
        for name in returned[0].mean:
            values[name] = _add([own.mean[name] for own in returned])
        logs: Logs = in_form(
            returned[0].form,
            iter(known.get(name, value) for name, value in values.items()),
        )
        return logs


def _add(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """One after the other, so that each may be given back once it is added."""
    first, *others = values
    for value in others:
        first = first + value
    return first


def _sum(example: Any, parts: Sequence[Any]) -> Any:
    """One weight's gradient over all devices."""
    if example is None:
        return None
    if not isinstance(example, tf.IndexedSlices):
        return _add(parts)
    values = tf.concat([part.values for part in parts], 0)
    indices = tf.concat([part.indices for part in parts], 0)
    places = example.indices.shape.num_elements()
    if places is None:
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return _sum_of_same_rows(values, indices, places, parts[0].dense_shape)


def _sum_of_same_rows(
    values: tf.Tensor, indices: tf.Tensor, places: int, shape: tf.Tensor
) -> tf.IndexedSlices:
    """The sum, where each part has as many rows whatever its samples.

    Where they are the very same ones (an embedding of positions) they are added up, as
    in ``gradients.py``. A device without samples has none.
    """
    by_part = tf.reshape(indices, [-1, places])
    same = tf.logical_and(
        tf.size(indices) > 0, tf.reduce_all(tf.equal(by_part, by_part[:1]))
    )

    def added() -> tuple[tf.Tensor, tf.Tensor]:
        each = tf.reshape(values, tf.concat([[-1, places], tf.shape(values)[1:]], 0))
        return tf.reduce_sum(each, 0), by_part[0]

    found, rows = tf.cond(same, added, lambda: (values, indices))
    return tf.IndexedSlices(found, rows, shape)
