"""Whether the losses of a batch's parts add up to the batch's loss, found by trying.

The engine assumes a mean over samples, and corrects what Keras's own losses do
otherwise (``losses.py``). A loss of the user's may be a sum, or may compare samples of
a batch with each other (a contrastive loss), and then no cut gives its gradient. So
before the first cut the loss of some rows is computed whole and in two unequal parts,
with the very corrections of a real step, and compared; a loss of the user's also for
all of the batch, from predictions made in small passes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from oomrun.worker.engine import attributes, losses, slicing

__all__ = [
    "COMPARES",
    "Separability",
    "first_part",
    "judge",
    "on_some_rows",
    "rows_for",
    "tolerance",
    "trial",
    "trial_of_all",
]

T = TypeVar("T")

_LEAST, _MOST = 3, 64
#: What ``Separability.NONE`` means.
COMPARES = (
    "its loss on some samples is neither the mean nor the sum of its loss on parts of "
    "them (it compares samples of a batch with each other, divides by what it finds in "
    "the batch, or adds sums to means), or it is 0 and shows nothing"
)


def rows_for(samples: int) -> int:
    """Rows of a trial: enough to show what depends on others, few enough to fit."""
    return min(samples, max(_LEAST, min(_MOST, samples // 4)))


def on_some_rows(data: Any, run: Callable[[Any], T]) -> T | None:
    """What ``run`` gives for some rows of ``data``, fewer where those do not fit."""
    for count in dict.fromkeys((rows_for(slicing.batch_size(data)), 3, 2)):
        try:
            return run(slicing.sample(data, count))
        except tf.errors.ResourceExhaustedError:
            continue
    return None


def first_part(rows: int) -> int:
    """Rows of the first of two unequal parts, which tell a mean from a sum."""
    return max(1, min(rows - 1, (2 * rows + 2) // 3))


class Separability(enum.Enum):
    """How the loss of a whole batch follows from those of its parts."""

    MEAN = "mean"
    SUM = "sum"
    NONE = "none"
    #: It draws random numbers even when it does not train, so this trial cannot tell.
    UNKNOWN = "unknown"


def trial(
    data: Any, rows: int, loss_of: Callable[[Any, Any], Any], *, traced: bool = False
) -> tuple[float, ...]:
    """Losses of ``rows`` rows: whole, whole again, as a mean and as a sum.

    Args:
        data: an eager batch of so many rows.
        rows: two or more.
        loss_of: the model's loss of a part, not training, with its reductions seen by
            the given ``losses.Divisors`` or corrected by ``losses.Reductions``.
        traced: whether it is run as a graph, one for parts of any size, as a real step
            is cut by.
    """

    sums = False

    def seen(part: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
        nonlocal sums
        divisors = losses.Divisors()
        loss = loss_of(slicing.take(part, start, stop), divisors)
        sums = divisors.sums
        return tf.reduce_sum(loss), divisors.values

    def corrected(part: Any, start: tf.Tensor, stop: tf.Tensor, totals: Any) -> Any:
        reductions = losses.Reductions(stop - start, tf.constant(rows), totals)
        return tf.reduce_sum(loss_of(slicing.take(part, start, stop), reductions))

    zero, first, last = map(tf.constant, (0, first_part(rows), rows))
    bounds = [(zero, first), (first, last)]
    loss_seen: Callable[..., Any] = seen
    loss_corrected: Callable[..., Any] = corrected
    if traced:
        loss_seen = slicing.traced_for(seen, data, *bounds[0])
    whole, again = (loss_seen(data, zero, last)[0] for _ in range(2))
    found = [loss_seen(data, *part) for part in bounds]
    totals = losses.total([divisors for _, divisors in found])
    of_parts = [float(loss) for loss, _ in found]
    if sums or any(total is not None for total in totals):
        if traced:
            loss_corrected = slicing.traced_for(corrected, data, *bounds[0], totals)
        of_parts = [float(loss_corrected(data, *part, totals)) for part in bounds]
    shares = [int(stop - start) / rows for start, stop in bounds]
    mean = sum(loss * share for loss, share in zip(of_parts, shares, strict=True))
    return float(whole), float(again), mean, sum(of_parts)


def trial_of_all(
    model: Any, data: Any, loss_of: Callable[..., Any]
) -> tuple[float, ...] | None:
    """As ``trial``, of all rows of a batch; None where it cannot be done.

    Only the predictions of all rows are held, made in small passes. They carry no
    masks, and losses that layers add are those of no pass: this tries the loss of
    targets and predictions alone.

    Args:
        model: built and compiled.
        data: (x, y, sample_weight).
        loss_of: the model's loss of x, y, y_pred and sample_weight.
    """
    samples = slicing.batch_size(data)
    if samples < _LEAST:
        return None
    with attributes.left_as_they_were(model):
        return _trial_of_all(model, data, samples, loss_of)


def _trial_of_all(
    model: Any, data: Any, samples: int, loss_of: Callable[..., Any]
) -> tuple[float, ...] | None:
    try:
        predictions = _predictions(model, data[0], max(1, samples // 8))
    except tf.errors.ResourceExhaustedError:
        return None

    def loss_of_part(part: Any, observer: Any) -> Any:
        x, y, sample_weight, y_pred = part
        with losses.correcting(observer), losses.tracking_nothing(model):
            return loss_of(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)

    return trial((*data, predictions), samples, loss_of_part)


def _predictions(model: Any, x: Any, size: int) -> Any:
    mode = {"training": False} if model._call_has_training_arg else {}

    def forward(x: Any) -> Any:
        return model(x, **mode)

    if not model.run_eagerly:
        forward = tf.function(forward, autograph=False, reduce_retracing=True)
    samples = slicing.batch_size(x)
    parts = [
        forward(
            slicing.take(x, tf.constant(start), tf.constant(min(start + size, samples)))
        )
        for start in range(0, samples, size)
    ]
    return keras.tree.map_structure(lambda *values: tf.concat(values, 0), *parts)


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
