"""The sum of gradients over micro-batches, as loop variables.

A dense gradient is added up in place. A sparse one (of an embedding) is kept as the
rows it consists of, or would consist of in the whole batch (``rows.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        # Not known before the step is run, as the number of samples may be.
        self._at_run_time = micro_batch_size
        cut = rows.Rows(samples, micro_batch_size)
        self._rows = [rows.of(gradient, cut) for gradient in self._example]

    def zeros(self) -> list[Any]:
        """The loop variables before the first part."""
        state: list[Any] = []
        for gradient, weight, kept in self._each(self._example):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                state.append(kept.begin(gradient))
            else:
                state.append(self._zeros(weight.shape, gradient.dtype))
        return state

    def _zeros(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Made in each step anew: TensorFlow does not know that it is zero.

        Of a constant it makes two tensors before the first step, one of which stays,
        and dies of SIGSEGV where there is no room for them (measured).
        """
        return tf.fill(shape, tf.cast(tf.minimum(self._at_run_time, 0), dtype))

    def add(
        self, state: Sequence[Any], index: tf.Tensor, gradients: Sequence[Any]
    ) -> list[Any]:
        """The loop variables after part ``index``, whose gradients are given."""
        old = iter(state)
        new: list[Any] = []
        for gradient, weight, kept in self._each(gradients):
            if gradient is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                new.append(kept.add(next(old), index, gradient))
            else:
                # A reshape in the gradient's computation may have lost its shape.
                new.append(next(old) + tf.ensure_shape(gradient, weight.shape))
        return new

    def result(self, state: Sequence[Any]) -> list[Any]:
        """The gradients of the whole batch, per weight as in ``example``."""
        final = iter(state)
        gradients: list[Any] = []
        for example, weight, kept in self._each(self._example):
            if example is None:
                gradients.append(None)
            elif isinstance(example, tf.IndexedSlices):
                values, indices = kept.result(next(final))
                shape = tf.constant(list(weight.shape), indices.dtype)
                gradients.append(rows.joined(example, values, indices, shape))
            else:
                gradients.append(next(final))
        return gradients

    def _each(self, gradients: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
        """Gradients, with their weights and how their rows are kept."""
        return zip(gradients, self._weights, self._rows, strict=True)
