"""Whether the losses of a batch's parts add up to the batch's loss, found by trying.

The engine assumes a mean over samples, and corrects what Keras's own losses do
otherwise (``losses.py``). A loss of the user's may be a sum, or may compare samples of
a batch with each other (a contrastive loss), and then no cut gives its gradient. So
before the first cut the loss of a few rows is computed whole and in two unequal parts,
with the very corrections of a real step, and compared.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oomrun.worker.engine import losses, slicing

__all__ = ["ROWS", "Separability", "judge", "tolerance", "trial"]

#: Rows of a trial: two unequal parts tell a mean from a sum.
ROWS = 3


class Separability(enum.Enum):
    """How the loss of a whole batch follows from those of its parts."""

    MEAN = "mean"
    SUM = "sum"
    NONE = "none"
    #: It draws random numbers even when it does not train, so this trial cannot tell.
    UNKNOWN = "unknown"


def trial(data: Any, rows: int, loss_of: Callable[[Any, Any], Any]) -> list[tf.Tensor]:
    """Losses of the first ``rows`` rows: whole, whole again, as a mean and as a sum.

    To be traced or run eagerly.

    Args:
        data: a batch of at least ``rows`` rows.
        rows: two or more.
        loss_of: the model's loss of a part, not training, with its reductions seen by
            the given ``losses.Divisors`` or corrected by ``losses.Reductions``.
    """

    def part(start: int, stop: int) -> Any:
        return slicing.take(data, tf.constant(start), tf.constant(stop))

    bounds = [(0, rows - 1), (rows - 1, rows)]
    whole = [loss_of(part(0, rows), losses.Divisors()) for _ in range(2)]
    seen = [losses.Divisors() for _ in bounds]
    for (start, stop), divisors in zip(bounds, seen, strict=True):
        loss_of(part(start, stop), divisors)
    totals = [
        None if first is None or last is None else first + last
        for first, last in zip(seen[0].values, seen[1].values, strict=True)
    ]
    mean = total = tf.zeros(())
    for start, stop in bounds:
        size = tf.constant(stop - start)
        reductions = losses.Reductions(size, tf.constant(rows), totals)
        loss = tf.reduce_sum(loss_of(part(start, stop), reductions))
        total = tf.cast(total, loss.dtype) + loss
        mean = tf.cast(mean, loss.dtype) + loss * ((stop - start) / rows)
    return [*map(tf.reduce_sum, whole), mean, total]


def tolerance(model: Any) -> float:
    """How far apart two computations of one loss may be, relative, by rounding."""
    dtypes = {getattr(layer, "compute_dtype", "") for layer in model._flatten_layers()}
    if dtypes & {"float16", "bfloat16"}:
        return 3e-2
    return 2e-5 if "float32" in dtypes else 1e-9


def judge(
    whole: float, again: float, mean: float, total: float, tolerance: float
) -> Separability:
    """What the losses of a ``trial`` say, equal within a relative ``tolerance``."""

    def close(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-9)

    if not close(whole, again):
        return Separability.UNKNOWN
    if close(whole, mean):
        return Separability.MEAN
    return Separability.SUM if close(whole, total) else Separability.NONE
