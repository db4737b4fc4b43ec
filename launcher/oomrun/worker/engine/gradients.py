"""The sum of gradients over micro-batches, as loop variables.

A dense gradient is added up in place. A sparse one (of an embedding) is kept as the
rows it consists of and joined at the end, as it would be for the whole batch: adding
it up dense would cost a tensor of the vocabulary's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["GradientSum"]


class GradientSum:
    """Loop variables for the gradients of ``weights``.

    Args:
        example: one part's gradients: None, a tensor, or IndexedSlices, per weight.
        weights: the weights, for shapes.
        passes: how many parts there are, an int32 scalar.
    """

    def __init__(
        self, example: Sequence[Any], weights: Sequence[Any], passes: tf.Tensor
    ) -> None:
        self._example = list(example)
        self._weights = list(weights)
        self._passes = passes

    def zeros(self) -> list[Any]:
        """The loop variables before the first part."""
        state: list[Any] = []
        for gradient, weight in zip(self._example, self._weights, strict=True):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                state.append(self._rows(gradient.values))
                state.append(self._rows(gradient.indices))
            else:
                state.append(tf.zeros(weight.shape, gradient.dtype))
        return state

    def _rows(self, tensor: tf.Tensor) -> tf.TensorArray:
        return tf.TensorArray(
            tensor.dtype,
            size=self._passes,
            element_shape=[None, *tensor.shape[1:]],
            infer_shape=False,
        )

    def add(
        self, state: Sequence[Any], index: tf.Tensor, gradients: Sequence[Any]
    ) -> list[Any]:
        """The loop variables after part ``index``, whose gradients are given."""
        old = iter(state)
        new: list[Any] = []
        for gradient in gradients:
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                new.append(next(old).write(index, gradient.values))
                new.append(next(old).write(index, gradient.indices))
            else:
                new.append(next(old) + gradient)
        return new

    def result(self, state: Sequence[Any]) -> list[Any]:
        """The gradients of the whole batch, per weight as in ``example``."""
        final = iter(state)
        gradients: list[Any] = []
        for gradient, weight in zip(self._example, self._weights, strict=True):
            if gradient is None:
                gradients.append(None)
            elif isinstance(gradient, tf.IndexedSlices):
                values, indices = next(final).concat(), next(final).concat()
                shape = tf.constant(list(weight.shape), indices.dtype)
                gradients.append(tf.IndexedSlices(values, indices, shape))
            else:
                gradients.append(next(final))
        return gradients
