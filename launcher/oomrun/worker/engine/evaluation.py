"""Evaluation in as many passes as memory asks for.

Metrics add up over parts of a batch as they do over batches, so a batch that does not
fit is cut; training's micro-batch is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from oomrun.worker.engine import losses, models, returning, slicing, trial

__all__ = ["Sizes", "TestFunction"]


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
    """A model's ``test_step`` over one batch at a time, cut where it must be.

    Args:
        model: compiled; its ``test_step`` may be its own.
        sizes: decides on the size of a pass.
        on_cut: told, before the first cut, what a trial has found.
    """

    __test__ = False  # no test class, whatever its name looks like to pytest

    def __init__(
        self, model: Any, sizes: Sizes, on_cut: Callable[[trial.Verdict], None]
    ) -> None:
        self._model, self._sizes, self._on_cut = model, sizes, on_cut
        self._whole = self._compiled(lambda data: models.evaluated(model, data))
        self._part = self._compiled(self._part_step)
        self._divisors = self._compiled(self._divisors_step)
        self._verdict: trial.Verdict | None = None
        self._spec: Any = None
        self._traced: dict[Any, Any] = {}
        self._none: list[Any] | None = None  # once it is known that there are none

    def __call__(self, iterator: Any) -> Any:
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                data = slicing.as_tensors(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise StopIteration from None
                break
            self._spec = getattr(iterator, "element_spec", None)
            logs = returning.aside(self._evaluate(data))
        return logs

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return step
        return tf.function(  # type: ignore[no-any-return]
            tf.autograph.experimental.do_not_convert(step),
            reduce_retracing=True,
            jit_compile=self._model.jit_compile or None,
        )

    def _trace(self, function: Any, data: Any, *others: Any) -> Any:
        """``function``, traced before it is first called, for batches of any size.

        As plain Keras does. Otherwise what the graph is, and so a result's last bits,
        would hang on which size came first: after a resume it may be another.
        """
        if function in self._traced:
            return self._traced[function]
        self._traced[function] = function
        if self._model.run_eagerly or self._spec is None:
            return function
        spec = slicing.spec_alike(slicing.with_any_rows(self._spec), data)
        if spec is None:
            return function
        try:
            specs = keras.tree.map_structure(tf.type_spec_from_value, list(others))
            function.get_concrete_function(spec, *specs)
        except (TypeError, ValueError):
            # Batches that are unlike their spec are traced when they come, by another
            # one: made by half, it would return nothing, and not say why.
            self._traced[function] = self._compiled(function.python_function)
        return self._traced[function]

    def _evaluate(self, data: Any) -> Any:
        samples = slicing.batch_size(data)
        if self._sizes.size(samples, "evaluate") >= samples:
            done = self._attempt(self._whole, (data,), samples, samples)
            if done is not None:
                return done[0]
        verdict = self._try(data)
        totals = self._total_divisors(data, samples)
        start, returned = 0, None
        while start < samples:
            size = min(self._sizes.size(samples, "evaluate"), samples - start)
            given = (
                slicing.cut(data, start, start + size),
                tf.constant(samples),
                totals,
            )
            done = self._attempt(self._part, given, size, samples)
            if done is not None:
                returned = returning.joined(returned, done[0], size / samples)
                start += size
        assert returned is not None
        return returned.logs(verdict.averaged)

    def _attempt(
        self, run: Callable[..., Any], given: tuple[Any, ...], size: int, samples: int
    ) -> tuple[Any] | None:
        """What ``run`` returns; None where it did not fit, and nothing has changed."""
        before = {id(v): tf.identity(v.value) for v in self._model.metrics_variables}
        try:
            result = self._trace(run, *given)(*given)
        except tf.errors.ResourceExhaustedError as error:
            message = str(error)
        else:
            self._sizes.ran(size, "evaluate")
            return (result,)
        for variable in self._model.metrics_variables:
            # Made by the pass that failed, it began at zero, as all metrics do.
            zero = tf.zeros(variable.shape, variable.dtype)
            variable.assign(before.get(id(variable), zero))
        if not self._sizes.shrink(size, samples, "evaluate", message, safe=True):
            raise tf.errors.ResourceExhaustedError(None, None, message)
        return None

    def _try(self, data: Any) -> trial.Verdict:
        if self._verdict is None:
            self._verdict = trial.try_evaluation(self._model, data)
            self._on_cut(self._verdict)
        return self._verdict

    def _part_step(self, data: Any, whole: tf.Tensor, totals: list[Any]) -> Any:
        rows = slicing.rows(data)
        reductions = losses.Reductions(rows, whole, totals)
        share = tf.cast(rows, tf.float64) / tf.cast(whole, tf.float64)
        return models.evaluated(self._model, data, share, reductions)

    def _total_divisors(self, data: Any, samples: int) -> list[Any]:
        """Divisors of the losses of the whole batch, from passes of the same size."""
        if self._none is not None:
            return self._none
        start, totals = 0, None
        while start < samples:
            size = min(self._sizes.size(samples, "evaluate"), samples - start)
            part = slicing.cut(data, start, start + size)
            done = self._attempt(self._divisors, (part,), size, samples)
            if done is None:
                continue
            if all(value is None for value in done[0]):
                self._none = list(done[0])
                return self._none
            totals = done[0] if totals is None else losses.total([totals, done[0]])
            start += size
        return list(totals or ())

    def _divisors_step(self, data: Any) -> list[Any]:
        seen = losses.Divisors()
        if models.has_own_evaluation(self._model):
            kept = [(v, tf.identity(v.value)) for v in self._model.metrics_variables]
            models.evaluated(self._model, data, 1.0, seen)
            for variable, value in kept:
                variable.assign(value)
        else:
            models.loss_of_part(self._model, data, seen)
        return seen.values
