"""The sum of gradients over micro-batches, as loop variables.

A dense gradient is added up in place. A sparse one (of an embedding) is kept as the
rows it consists of (``rows.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from oomrun.worker.engine import rows

__all__ = ["GradientSum"]


class GradientSum:
    """Loop variables for the gradients of ``weights``.

    Args:
        example: one part's gradients: None, a tensor, or IndexedSlices, per weight.
        weights: the weights, for shapes.
        samples: that the parts have together, an int32 scalar.
        micro_batch_size: that each but the last has, an int32 scalar.
    """

    def __init__(
        self,
        example: Sequence[Any],
        weights: Sequence[Any],
        samples: tf.Tensor,
        micro_batch_size: tf.Tensor,
    ) -> None:
        self._example = list(example)
        self._weights = list(weights)
        self._rows = rows.Rows(samples, micro_batch_size)

    def zeros(self) -> list[Any]:
        """The loop variables before the first part."""
        state: list[Any] = []
        for gradient, weight in zip(self._example, self._weights, strict=True):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                state.append(self._rows.begin(gradient))
            else:
                state.append(self._zeros(weight.shape, gradient.dtype))
        return state

    def _zeros(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Made in each step anew: TensorFlow does not know that it is zero.

        Of a constant it makes two tensors before the first step, one of which stays,
        and dies of SIGSEGV where there is no room for them (measured).
        """
        return tf.fill(shape, tf.cast(tf.minimum(self._rows.samples, 0), dtype))

    def add(
        self, state: Sequence[Any], index: tf.Tensor, gradients: Sequence[Any]
    ) -> list[Any]:
        """The loop variables after part ``index``, whose gradients are given."""
        old = iter(state)
        new: list[Any] = []
        for gradient, weight in zip(gradients, self._weights, strict=True):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                new.append(self._rows.add(next(old), index, gradient))
            else:
                # A reshape in the gradient's computation may have lost its shape.
                new.append(next(old) + tf.ensure_shape(gradient, weight.shape))
        return new

    def result(self, state: Sequence[Any]) -> list[Any]:
        """The gradients of the whole batch, per weight as in ``example``."""
        final = iter(state)
        gradients: list[Any] = []
        for example, weight in zip(self._example, self._weights, strict=True):
            if example is None:
                gradients.append(None)
            elif isinstance(example, tf.IndexedSlices):
                found = self._rows.result(next(final))
                shape = tf.constant(list(weight.shape), found[1].dtype)
                gradients.append(rows.joined(example, *found, shape))
            else:
                gradients.append(next(final))
        return gradients
