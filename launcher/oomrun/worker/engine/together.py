"""What the workers of a group do together in a step, behind the line.

Covers: the sums of gradients, and of what the passes have changed. Does not cover: the
passes themselves (``shared_step.py`` for a Keras model, ``shared_loss_step.py`` for a
loss function).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from oomrun.core.strategy import Group
from oomrun.worker.engine import cutting, joining, rows, slicing

__all__ = ["Share", "join_state", "now_behind", "summed", "taken"]


@dataclass(frozen=True)
class Share(cutting.Batch):
    """Rows ``first`` to ``first + share`` of a batch, cut into parts."""

    first: tf.Tensor
    share: tf.Tensor

    @property
    def cut_samples(self) -> tf.Tensor:
        return self.share

    def start(self, index: tf.Tensor) -> tf.Tensor:
        return self.first + index * self.micro_batch_size

    def part(self, index: tf.Tensor) -> Any:
        start, end = self.start(index), self.first + self.share
        stop = tf.minimum(start + self.micro_batch_size, end)
        return slicing.take(self.data, start, stop)

    def whole(self) -> cutting.Batch:
        return cutting.Batch(self.data, self.micro_batch_size)


def summed(
    group: Group, examples: Sequence[Any], gradients: Sequence[Any], name: str
) -> list[Any]:
    """The gradients of all workers, whose kinds ``examples`` of one part show."""
    dense = [g for g in gradients if g is not None and _is_dense(g)]
    sums = iter(group.sums(dense, name) if dense else [])
    found: list[Any] = []
    for index, (example, gradient) in enumerate(zip(examples, gradients, strict=True)):
        if gradient is None:
            found.append(None)
        elif _is_dense(gradient):
            total = next(sums)
            total.set_shape(gradient.shape)
            found.append(total)
        else:
            found.append(_rows(group, example, gradient, f"{name}.{index}"))
    return found


def _rows(
    group: Group, example: tf.IndexedSlices, gradient: tf.IndexedSlices, name: str
) -> tf.IndexedSlices:
    """A sparse gradient: the rows of all workers."""
    values = group.joined(gradient.values, f"{name}.values")
    indices = group.joined(gradient.indices, f"{name}.indices")
    return rows.joined(example, values, indices, gradient.dense_shape)


def taken(
    shared: Callable[..., tuple[Any, tf.Tensor, tf.Tensor]], data: Any, *told: int
) -> tuple[Any, int, float | None]:
    """Takes a step that all workers share.

    Args:
        shared: the step; gives its result, the sum of wishes, and the time at which
            this worker's own gradients were there.
        data: the whole batch.
        told: the first row of the share, its rows, rows a pass, this worker's wish.

    Returns:
        The result, the sum of wishes, and the seconds until the gradients were there;
        None where the clock was set meanwhile.
    """
    began = time.time()
    result, wishes, at = shared(data, *(tf.constant(number) for number in told))
    took_s = float(at) - began
    return result, int(wishes), took_s if took_s > 0 else None


def join_state(
    group: Group,
    metrics: Sequence[Any],
    before: Sequence[tf.Tensor],
    others: Sequence[Any],
    others_before: Sequence[tf.Tensor],
    weight: tf.Tensor,
) -> None:
    """Makes what the passes have changed the same in all workers.

    Args:
        group: the workers.
        metrics: variables that hold sums over samples: their changes add up.
        before: the values that these had before the passes.
        others: of numbers with a fraction it is the mean weighted by samples, of whole
            ones the highest.
        others_before: the values that those had before the passes, alike everywhere.
        weight: this worker's part of the batch's samples.
    """
    paired = zip(others, others_before, strict=True)
    means = [(v, old) for v, old in paired if v.value.dtype.is_floating]
    counted = list(zip(metrics, before, strict=True))
    changes = [joining.change(v.value, old) for v, old in counted]
    changes += [
        joining.change(v.value, old) * tf.cast(weight, old.dtype) for v, old in means
    ]
    if changes:
        sums = group.sums(changes, "oomrun.state")
        for (variable, old), total in zip([*counted, *means], sums, strict=True):
            variable.assign(old + total)
    for index, variable in enumerate(others):
        if variable.value.dtype.is_integer:
            values = tf.expand_dims(tf.identity(variable.value), 0)
            values = group.joined(values, f"oomrun.counts.{index}")
            variable.assign(tf.reduce_max(values, 0))


def now_behind(gradients: Sequence[Any]) -> tf.Tensor:
    """The time at which gradients are there, not when they were asked for."""
    present = [g for g in gradients if g is not None]
    with tf.device("CPU:0"):
        # A value from an accelerator is there only once it has computed it.
        some = [
            tf.identity(tf.reshape(g if _is_dense(g) else g.values, [-1])[:1])
            for g in present[:1]
        ]
        with tf.control_dependencies(some):
            return tf.timestamp()


def _is_dense(gradient: Any) -> bool:
    return not isinstance(gradient, tf.IndexedSlices)
