"""Evaluation and prediction in as many passes as memory asks for.

Metrics add up over parts of a batch as they do over batches, and predictions are
joined, so a batch that does not fit is cut; training's micro-batch is not touched.
"""

from __future__ import annotations

from typing import Any, Protocol

import keras
import tensorflow as tf

from oomrun.worker.engine import slicing

__all__ = ["PredictFunction", "TestFunction"]


class Sizes(Protocol):
    """Who decides on the size of a pass, and hears that one did not fit."""

    def size(self, samples: int, phase: str = ...) -> int:
        """Samples a pass."""

    def ran(self, size: int, phase: str = ...) -> None:
        """A size has worked."""

    def shrink(
        self, size: int, samples: int, phase: str, message: str, *, safe: bool
    ) -> bool:
        """A size has not fitted; whether a smaller one may be tried now."""


class TestFunction:
    """Keras's test function over one batch at a time, cut where it must be."""

    __test__ = False  # no test class, whatever its name looks like to pytest

    def __init__(self, model: Any, original: Any, sizes: Sizes) -> None:
        self._model, self._original, self._sizes = model, original, sizes

    def __call__(self, iterator: Any) -> Any:
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                data = slicing.as_tensors(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            logs = self._evaluate(data)
        return logs

    def _evaluate(self, data: Any) -> Any:
        samples = slicing.batch_size(data)
        start, logs = 0, None
        while start < samples:
            size = min(self._sizes.size(samples, "evaluate"), samples - start)
            before = [tf.identity(v.value) for v in self._model.metrics_variables]
            try:
                part = data if size == samples else _cut(data, start, start + size)
                logs = self._original(iter([part]))
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
            else:
                self._sizes.ran(size, "evaluate")
                start += size
                continue
            for variable, value in zip(
                self._model.metrics_variables, before, strict=False
            ):
                variable.assign(value)
            if not self._sizes.shrink(size, samples, "evaluate", message, safe=True):
                raise tf.errors.ResourceExhaustedError(None, None, message)
        return logs


class PredictFunction:
    """Keras's predict function over a list of batches, cut where they must be."""

    def __init__(self, original: Any, sizes: Sizes) -> None:
        self._original, self._sizes = original, sizes

    def __call__(self, batches: Any) -> Any:
        try:
            samples = slicing.batch_size(slicing.as_tensors(batches[0]))
        except ValueError:
            return self._original(batches)
        if self._sizes.size(samples, "evaluate") >= samples:
            try:
                return self._original(batches)
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
            if not self._sizes.shrink(samples, samples, "predict", message, safe=True):
                raise tf.errors.ResourceExhaustedError(None, None, message)
        parts = [self._predict(slicing.as_tensors(data)) for data in batches]
        return _joined(parts)

    def _predict(self, data: Any) -> Any:
        samples = slicing.batch_size(data)
        start, parts = 0, []
        while start < samples:
            size = min(self._sizes.size(samples, "evaluate"), samples - start)
            try:
                parts.append(self._original([_cut(data, start, start + size)]))
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
            else:
                self._sizes.ran(size, "evaluate")
                start += size
                continue
            if not self._sizes.shrink(size, samples, "predict", message, safe=True):
                raise tf.errors.ResourceExhaustedError(None, None, message)
        return _joined(parts)


def _cut(data: Any, start: int, stop: int) -> Any:
    return slicing.take(data, tf.constant(start), tf.constant(stop))


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return keras.tree.map_structure(lambda *values: tf.concat(values, 0), *parts)
