"""The sum of gradients over micro-batches, as loop variables.

A dense gradient is added up in place. A sparse one (of an embedding) is kept as the
rows it consists of (``rows.py``), as it would be for the whole batch: Keras's
optimizers square row by row, so that they cannot be added up before. But where each
part has the very same rows (an embedding of positions) they are: the whole batch has
each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from oomrun.worker.engine.rows import Rows

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
        self._passes = -(-samples // micro_batch_size)
        self._rows = Rows(samples, micro_batch_size)

    def zeros(self) -> list[Any]:
        """The loop variables before the first part."""
        state: list[Any] = []
        for gradient, weight in zip(self._example, self._weights, strict=True):
            if gradient is None:
                continue
            if _any_rows(gradient):
                state.append(self._rows.begin(gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                parts = (gradient.values, gradient.indices)
                state.append(tuple(map(self._array, parts)))
            else:
                state.append(self._zeros(weight.shape, gradient.dtype))
        return state

    def _zeros(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Made in each step anew: TensorFlow does not know that it is zero.

        Of a constant it makes two tensors before the first step, one of which stays,
        and dies of SIGSEGV where there is no room for them (measured).
        """
        return tf.fill(shape, tf.cast(tf.minimum(self._passes, 0), dtype))

    def _array(self, tensor: tf.Tensor) -> tf.TensorArray:
        # Its shape is known also without a part: an empty share has none.
        return tf.TensorArray(
            tensor.dtype,
            size=self._passes,
            element_shape=tensor.shape,
            infer_shape=False,
        )

    def add(
        self, state: Sequence[Any], index: tf.Tensor, gradients: Sequence[Any]
    ) -> list[Any]:
        """The loop variables after part ``index``, whose gradients are given."""
        old = iter(state)
        new: list[Any] = []
        kinds = zip(gradients, self._example, self._weights, strict=True)
        for gradient, example, weight in kinds:
            if gradient is None:
                continue
            if _any_rows(example):
                new.append(self._rows.add(next(old), index, gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                values, indices = next(old)
                values = values.write(index, gradient.values)
                new.append((values, indices.write(index, gradient.indices)))
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
                joined = self._rows.result if _any_rows(example) else _joined
                values, indices = joined(next(final))
                shape = tf.constant(list(weight.shape), indices.dtype)
                gradients.append(tf.IndexedSlices(values, indices, shape))
            else:
                gradients.append(next(final))
        return gradients


def _any_rows(example: Any) -> bool:
    """Whether it is a sparse one of as many rows as the part has samples, say."""
    return (
        isinstance(example, tf.IndexedSlices)
        and example.indices.shape.num_elements() is None
    )


def _joined(
    state: tuple[tf.TensorArray, tf.TensorArray],
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of all parts, as many in each, and the places they are for."""
    values, indices = state
    # Chance may have drawn them (negatives): then they differ.
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
