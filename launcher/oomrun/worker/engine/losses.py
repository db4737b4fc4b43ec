"""Makes the losses of the parts of a batch add up to the loss of the whole.

A step's gradient is that of the loss of the whole batch. Cut into parts of ``n_j`` of
``n`` samples, the engine weights part j's total loss by ``n_j / n``. That is exact for
a mean over samples, and for what is counted once a step (regularisation). Keras has
reductions for which it is not, each corrected here by a factor on its own loss value:

- ``sum``: the parts simply add up: factor ``n / n_j``;
- a mean over valid entries (masks) or over sample weights
  (``mean_with_sample_weight``): weight by the part's own divisor ``d_j``:
  factor ``(d_j / d) * (n / n_j)``, where ``d`` is the divisor of the whole batch and
  has to be known before the first part (``Divisors``).

All losses of Keras reduce in one function, ``reduce_weighted_values``; it is replaced
while a step is traced. Source: keras/src/losses/loss.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss

__all__ = [
    "Divisors",
    "Reductions",
    "correcting",
    "total",
    "tracking_nothing",
    "tracking_shares",
]

# Before 3.13, Keras adds its epsilon to the count of a mask's valid entries before it
# divides by it, against a count of 0.
_ADDS_EPSILON = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13)


class Divisors:
    """Collects the divisors of the losses, in the order of their calls.

    Attributes:
        values: one for each; None: it has none that matters.
        sums: whether one of them is a sum over samples.
    """

    def __init__(self) -> None:
        self.values: list[tf.Tensor | None] = []
        self.sums = False

    def note(self, divisor: tf.Tensor | None, reduction: str | None) -> None:
        """Of one loss."""
        self.values.append(divisor)
        self.sums = self.sums or reduction == "sum"

    @property
    def needed(self) -> bool:
        """Whether any loss has a divisor that must be known for the whole batch."""
        return any(value is not None for value in self.values)


def total(divisors: Sequence[Sequence[tf.Tensor | None]]) -> list[tf.Tensor | None]:
    """The divisors of a whole batch, from those of its parts."""
    return [
        None if of_parts[0] is None else sum(of_parts[1:], of_parts[0])
        for of_parts in zip(*divisors, strict=True)
    ]


class Reductions:
    """The whole batch's divisors, and the part's weight, while a part is traced."""

    def __init__(
        self, part: tf.Tensor, whole: tf.Tensor, totals: Sequence[tf.Tensor | None]
    ) -> None:
        self._ratio = (whole, part)
        self._totals = list(totals)
        self._calls = 0

    def factor(self, divisor: tf.Tensor | None, reduction: str | None) -> Any:
        """What this call's loss value has to be multiplied by; None for 1."""
        index, self._calls = self._calls, self._calls + 1
        whole, part = self._ratio
        if divisor is not None:
            total = self._totals[index] if index < len(self._totals) else None
            if total is None:
                raise RuntimeError("a loss was called in another order than before")
            masked = reduction != "mean_with_sample_weight"
            added = keras.config.epsilon() if masked and _ADDS_EPSILON else 0.0
            share = tf.math.divide_no_nan(divisor + added, total + added)
            return share * tf.cast(whole, share.dtype) / tf.cast(part, share.dtype)
        if reduction == "sum":
            return tf.cast(whole, tf.float64) / tf.cast(part, tf.float64)
        return None


@contextlib.contextmanager
def correcting(observer: Divisors | Reductions) -> Iterator[None]:
    """Replaces Keras's loss reduction while the block traces a step."""
    original = keras_loss.reduce_weighted_values

    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(
            values,
            sample_weight=sample_weight,
            mask=mask,
            reduction=reduction,
            dtype=dtype,
        )
        divisor = _divisor(values, sample_weight, mask, reduction, loss.dtype)
        if isinstance(observer, Divisors):
            observer.note(divisor, reduction)
            return loss
        factor = observer.factor(divisor, reduction)
        return loss if factor is None else loss * tf.cast(factor, loss.dtype)

    keras_loss.reduce_weighted_values = reduce_weighted_values
    try:
        yield
    finally:
        keras_loss.reduce_weighted_values = original


def _divisor(
    values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any
) -> tf.Tensor | None:
    """What the reduction divides by, up to a factor that is alike in all parts."""
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    if reduction != "mean_with_sample_weight":
        return None
    if sample_weight is None and mask is None:
        return None
    weights = keras_loss.apply_mask(
        None if sample_weight is None else tf.cast(sample_weight, dtype),
        None if mask is None else tf.cast(mask, dtype),
        dtype=dtype,
        reduction=reduction,
    )
    _, weights = keras_loss.squeeze_or_expand_to_same_rank(
        keras.ops.convert_to_tensor(values), weights
    )
    return tf.reduce_sum(weights)


def tracking_nothing(model: Any) -> contextlib.AbstractContextManager[None]:
    """Has those trackers count nothing: the pass that is traced is not the real one."""
    return _tracking(model, lambda update, values: None)


@contextlib.contextmanager
def tracking_shares(model: Any, share: float | tf.Tensor) -> Iterator[None]:
    """Has every mean over batches count a part for the share it is of its batch.

    Keras averages over batches what is one value a batch: the losses of each output, a
    metric function that returns a scalar, a script's own ``Mean`` of its loss. Counted
    for ``n_j / n`` each, the parts of a batch add up to that batch.

    Args:
        model: the compiled model.
        share: the part's samples of the batch's, a float64 scalar; 1 for the whole
            batch, of which Keras would count the static size, where it sees one, or 1.
    """
    original = keras.metrics.Mean.update_state
    share = tf.convert_to_tensor(share, tf.float64)

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and tf.TensorShape(_shape(values)).rank == 0:
            sample_weight = tf.cast(share, metric.dtype)
        return original(metric, values, sample_weight)

    def update(update_of_metric: Any, values: Any) -> Any:
        return update_of_metric(values, sample_weight=share)

    keras.metrics.Mean.update_state = update_state
    try:
        with _tracking(model, update):
            yield
    finally:
        keras.metrics.Mean.update_state = original


def _shape(values: Any) -> Any:
    return values.shape if hasattr(values, "shape") else np.shape(values)


@contextlib.contextmanager
def _tracking(model: Any, update: Callable[[Any, Any], Any]) -> Iterator[None]:
    # Keras before 3.5 keeps no per-output losses, and its CompileLoss no ``metrics``.
    metrics = list(getattr(model._compile_loss, "metrics", ()))
    originals = [metric.update_state for metric in metrics]

    def replaced(original: Any) -> Any:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            del sample_weight
            return update(original, values)

        return update_state

    for metric, original in zip(metrics, originals, strict=True):
        metric.update_state = replaced(original)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.update_state
