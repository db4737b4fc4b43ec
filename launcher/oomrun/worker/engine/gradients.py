"""The sum of gradients over micro-batches, as loop variables.

A dense gradient is added up in place. A sparse one (of an embedding) is kept as the
rows it consists of and joined at the end, as it would be for the whole batch: adding
it up dense would cost a tensor of the vocabulary's size. Where each part has the very
same rows (an embedding of positions) they are added up: the whole batch has each once,
and Keras's optimizers square row by row.
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
                # Where it is known, also without a part: an empty share has none.
                rows = gradient.indices.shape.num_elements()
                state.append(self._rows(gradient.values, rows))
                state.append(self._rows(gradient.indices, rows))
            else:
                state.append(self._zeros(weight.shape, gradient.dtype))
        return state

    def _zeros(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Made in each step anew: TensorFlow does not know that it is zero.

        Of a constant it makes two tensors before the first step, one of which stays,
        and dies of SIGSEGV where there is no room for them (measured).
        """
        return tf.fill(shape, tf.cast(tf.minimum(self._passes, 0), dtype))

    def _rows(self, tensor: tf.Tensor, rows: int | None) -> tf.TensorArray:
        return tf.TensorArray(
            tensor.dtype,
            size=self._passes,
            element_shape=[rows, *tensor.shape[1:]],
            infer_shape=False,
        )

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
                new.append(next(old).write(index, gradient.values))
                new.append(next(old).write(index, gradient.indices))
            else:
                # A reshape in the gradient's computation may have lost its shape.
                new.append(next(old) + tf.ensure_shape(gradient, weight.shape))
        return new

    def result(self, state: Sequence[Any]) -> list[Any]:
        """The gradients of the whole batch, per weight as in ``example``."""
        final = iter(state)
        gradients: list[Any] = []
        for gradient, weight in zip(self._example, self._weights, strict=True):
            if gradient is None:
                gradients.append(None)
            elif isinstance(gradient, tf.IndexedSlices):
                values, indices = _joined(gradient, next(final), next(final))
                shape = tf.constant(list(weight.shape), indices.dtype)
                gradients.append(tf.IndexedSlices(values, indices, shape))
            else:
                gradients.append(next(final))
        return gradients


def _joined(
    example: tf.IndexedSlices, values: tf.TensorArray, indices: tf.TensorArray
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of all parts, and the places in the table that they are for."""
    if example.indices.shape.num_elements() is None:
        return values.concat(), indices.concat()  # as many as the part has samples
    # As many in each part. Chance may have drawn them (negatives): then they differ.
    places = indices.stack()
    same = tf.logical_and(
        tf.size(places) > 0, tf.reduce_all(tf.equal(places, places[:1]))
    )
    return (
        tf.cond(
            same, lambda: tf.reduce_sum(values.stack(), 0), lambda: values.concat()
        ),
        tf.cond(same, lambda: places[0], lambda: tf.reshape(places, [-1])),
    )
