"""Prediction in as many passes as memory asks for, joined again.

Whether a row's prediction depends on the other rows of its batch is tried on a few rows
before the first cut; such a model is not cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from oomrun.worker.engine import separability, slicing
from oomrun.worker.engine.evaluation import Sizes

__all__ = ["PredictFunction"]


class PredictFunction:
    """Keras's predict function over a list of batches, cut where they must be.

    Args:
        model: whose predictions they are.
        original: Keras's function.
        sizes: decides on the size of a pass.
        on_refused: called where batches must be cut and cannot be.
    """

    def __init__(
        self, model: Any, original: Any, sizes: Sizes, on_refused: Callable[[], None]
    ) -> None:
        self._model, self._original, self._sizes = model, original, sizes
        self._on_refused = on_refused
        self._by_row: bool | None = None

    def __call__(self, batches: Any) -> Any:
        try:
            samples = slicing.batch_size(slicing.as_tensors(batches[0]))
        except ValueError:
            return self._original(batches)
        fits = self._sizes.size(samples, "evaluate") >= samples
        if fits or not self._may_cut(batches[0]):
            try:
                return self._original(batches)
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
            again = self._may_cut(batches[0]) and self._sizes.shrink(
                samples, samples, "predict", message, safe=True
            )
            if not again:
                raise tf.errors.ResourceExhaustedError(None, None, message)
        parts = [self._predict(slicing.as_tensors(data)) for data in batches]
        return _joined(parts)

    def _predict(self, data: Any) -> Any:
        samples = slicing.batch_size(data)
        start, parts = 0, []
        while start < samples:
            size = min(self._sizes.size(samples, "evaluate"), samples - start)
            try:
                parts.append(self._original([slicing.cut(data, start, start + size)]))
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
            else:
                self._sizes.ran(size, "evaluate")
                start += size
                continue
            if not self._sizes.shrink(size, samples, "predict", message, safe=True):
                raise tf.errors.ResourceExhaustedError(None, None, message)
        return _joined(parts)

    def _may_cut(self, batch: Any) -> bool:
        if self._by_row is None:
            data = slicing.as_tensors(batch)
            self._by_row = bool(separability.on_some_rows(data, self._try))
            if not self._by_row:
                self._on_refused()
        return self._by_row

    def _try(self, few: Any) -> bool:
        """Whether the predictions of a few rows are those of their parts."""
        rows = slicing.batch_size(few)
        first = separability.first_part(rows)
        bounds = [(0, first), (first, rows)] if first < rows else [(0, rows)]
        try:
            whole, again = self._original([few]), self._original([few])
            parts = [self._original([slicing.cut(few, *bound)]) for bound in bounds]
            joined = _joined(parts)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError):
            return False  # an output without rows cannot be joined
        tolerance = separability.tolerance(self._model)
        if not _alike(whole, again, tolerance):
            return True  # it draws random numbers, as it would whole
        return _alike(whole, joined, tolerance)


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(
        np.shape(a) == np.shape(b) and _close(np.asarray(a), np.asarray(b), tolerance)
        for a, b in pairs
    )


def _close(one: Any, other: Any, tolerance: float) -> bool:
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    scale = max(float(np.abs(one).max(initial=0.0)), 1e-9)
    return bool(np.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True))


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return keras.tree.map_structure(lambda *values: tf.concat(values, 0), *parts)
