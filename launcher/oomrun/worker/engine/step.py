"""One optimizer step over a batch, whole or in micro-batches, with the same result.

The whole batch in one pass is Keras's own step in Keras's own order. In micro-batches
it is one ``tf.while_loop`` over slices of the batch with the gradients as loop
variables, and one ``apply_gradients`` after it: one trace for every micro-batch size.

Everything that decides the new weights is computed before the first variable is
written: ``StepFunction.applying`` tells on which side of that line a step failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from oomrun.worker.engine import losses, separability, slicing
from oomrun.worker.engine.gradients import GradientSum
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import Snapshot

__all__ = ["StepFunction", "can_step", "loss_of", "unpack"]

Logs = dict[str, Any]


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """A batch as (x, y, sample_weight), as Keras reads it."""
    return keras.utils.unpack_x_y_sample_weight(data)  # type: ignore[no-any-return]


def can_step(model: Any) -> str:
    """Why the engine cannot take this model's steps; empty where it can."""
    base = keras.Model
    cls = type(model)
    for name in ("train_step", "make_train_function"):
        if getattr(cls, name) is not getattr(base, name):
            return f"{cls.__name__} has a {name} of its own"
    if name := next((n for n in ("train_step",) if n in vars(model)), ""):
        return f"the model was given a {name} of its own"
    if model.optimizer is None:
        return "the model was compiled without an optimizer"
    return ""


def loss_of(model: Any, **batch: Any) -> Any:
    """The model's total loss of a batch: x, y, y_pred and sample_weight."""
    # Keras 3.3 has only the method that users override; later ones reach it through
    # another, which knows whether the override takes ``training``.
    compute = getattr(model, "_compute_loss", None) or model.compute_loss
    return compute(**batch)


class StepFunction:
    """The compiled steps of one model, as it was compiled.

    Args:
        model: a built and compiled Keras model whose ``train_step`` is Keras's own.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.snapshot = Snapshot(model)
        self._line = tf.Variable(False, trainable=False, name="oomrun_applying")
        self._whole = self._compiled(self._whole_step, jit=model.jit_compile)
        self._parts = self._compiled(self._split_step, jit=False)
        self._separability: Separability | None = None

    @property
    def applying(self) -> bool:
        """Whether the last step that failed had begun to write weights."""
        return bool(self._line.numpy())

    def separability(self, data: Any) -> Separability:
        """How this model's loss can be cut, tried on the first rows of ``data``."""
        if self._separability is None:
            rows = min(separability.ROWS, slicing.batch_size(data))
            few = slicing.take(data, tf.constant(0), tf.constant(rows))
            self.snapshot.take()
            try:
                tried = self._compiled(
                    lambda data: separability.trial(data, rows, self._loss_of),
                    jit=False,
                )(few)
            finally:
                self.snapshot.restore()
            tolerance = separability.tolerance(self._model)
            whole, again, mean, total = map(float, tried)
            self._separability = separability.judge(
                whole, again, mean, total, tolerance=tolerance
            )
        return self._separability

    def _loss_of(self, data: Any, observer: Any) -> tf.Tensor:
        x, y, sample_weight = unpack(data)
        with losses.correcting(observer), losses.tracking_nothing(self._model):
            return self._loss(
                x=x,
                y=y,
                y_pred=self._forward(x, training=False),
                sample_weight=sample_weight,
            )

    def run(self, data: Any, samples: int, micro_batch_size: int) -> Logs:
        """One optimizer step over ``data``.

        Args:
            data: the batch as Keras packs it, tensors with ``samples`` rows.
            samples: rows of the batch.
            micro_batch_size: rows a pass.

        Returns:
            The logs that Keras's ``train_step`` would return.

        Raises:
            tf.errors.ResourceExhaustedError: see ``applying`` and ``snapshot``.
        """
        if micro_batch_size >= samples:
            return self._whole(data)  # type: ignore[no-any-return]
        return self._parts(  # type: ignore[no-any-return]
            data, tf.constant(micro_batch_size, tf.int32)
        )

    def _compiled(self, step: Callable[..., Any], *, jit: bool) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return step
        return tf.function(  # type: ignore[no-any-return]
            tf.autograph.experimental.do_not_convert(step),
            reduce_retracing=True,
            jit_compile=jit or None,
        )

    def _whole_step(self, data: Any) -> Logs:
        model = self._model
        self._begin()
        x, y, sample_weight = unpack(data)
        samples = slicing.rows(data)
        with tf.GradientTape() as tape:
            predictions = self._forward(x, training=True)
            with losses.tracking_by_samples(model, samples):
                loss = self._loss(
                    x=x, y=y, y_pred=predictions, sample_weight=sample_weight
                )
            model._loss_tracker.update_state(loss, sample_weight=samples)
            scaled = model.optimizer.scale_loss(loss)
        weights = model.trainable_weights
        self._apply(tape.gradient(scaled, weights), weights)
        logs: Logs = model.compute_metrics(
            x, y, predictions, sample_weight=sample_weight
        )
        return logs

    def _split_step(self, data: Any, micro_batch_size: tf.Tensor) -> Logs:
        model = self._model
        self._begin()
        samples = slicing.rows(data)
        passes = -(-samples // micro_batch_size)
        weights = model.trainable_weights

        def part(index: tf.Tensor) -> Any:
            start = index * micro_batch_size
            return slicing.take(
                data, start, tf.minimum(start + micro_batch_size, samples)
            )

        divisors, example = self._scout(part)
        totals = self._total_divisors(part, passes, divisors)
        total = GradientSum(example, weights, passes)

        def body(index: tf.Tensor, *state: Any) -> Any:
            gradients = self._part_gradients(part(index), samples, totals)
            return (index + 1, *total.add(state, index, gradients))

        _, *state = tf.while_loop(
            lambda index, *_: index < passes,
            body,
            (tf.constant(0), *total.zeros()),
            parallel_iterations=1,  # two parts at once would need the memory of two
        )
        self._apply(total.result(state), weights)
        return dict(model.get_metrics_result())

    def _part_gradients(
        self, data: Any, whole: tf.Tensor, totals: list[tf.Tensor | None]
    ) -> list[Any]:
        """The part's contribution to the gradient of the whole batch's loss."""
        model = self._model
        x, y, sample_weight = unpack(data)
        samples = slicing.rows(data)
        reductions = losses.Reductions(samples, whole, totals)
        with tf.GradientTape() as tape:
            predictions = self._forward(x, training=True)
            with (
                losses.correcting(reductions),
                losses.tracking_by_samples(model, samples),
            ):
                loss = self._loss(
                    x=x, y=y, y_pred=predictions, sample_weight=sample_weight
                )
            if self._separability is Separability.SUM:
                loss *= tf.cast(whole, loss.dtype) / tf.cast(samples, loss.dtype)
            model._loss_tracker.update_state(loss, sample_weight=samples)
            share = tf.cast(samples, loss.dtype) / tf.cast(whole, loss.dtype)
            scaled = model.optimizer.scale_loss(loss * share)
        gradients: list[Any] = tape.gradient(scaled, model.trainable_weights)
        model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
        return gradients

    def _scout(
        self, part: Callable[[tf.Tensor], Any]
    ) -> tuple[losses.Divisors, list[Any]]:
        """Traces one part without running it: its losses and its gradients' kinds.

        The loop's variables must be known before its body is traced: which weights
        have no gradient, and which a sparse one.
        """
        divisors = losses.Divisors()
        found: list[Any] = []

        def scout() -> None:
            x, y, sample_weight = unpack(part(tf.constant(0)))
            with tf.GradientTape() as tape:
                predictions = self._forward(x, training=True)
                with losses.correcting(divisors):
                    loss = self._loss(
                        x=x, y=y, y_pred=predictions, sample_weight=sample_weight
                    )
            found.extend(tape.gradient(loss, self._model.trainable_weights))

        graph = tf.__internal__.FuncGraph("oomrun_scout")
        with graph.as_default():
            scout()
        return divisors, found

    def _total_divisors(
        self,
        part: Callable[[tf.Tensor], Any],
        passes: tf.Tensor,
        divisors: losses.Divisors,
    ) -> list[tf.Tensor | None]:
        """Divisors of the whole batch: a pass over the parts ahead of the real one.

        TensorFlow prunes from it all that the divisors do not depend on, which for
        masks and weights is nearly everything.
        """
        if not divisors.needed:
            return [None] * len(divisors.values)

        def body(index: tf.Tensor, *sums: tf.Tensor) -> Any:
            seen = losses.Divisors()
            self._loss_of(part(index), seen)
            present = [value for value in seen.values if value is not None]
            return (index + 1, *[a + b for a, b in zip(sums, present, strict=True)])

        present = [value for value in divisors.values if value is not None]
        _, *sums = tf.while_loop(
            lambda index, *_: index < passes,
            body,
            (tf.constant(0), *[tf.zeros((), value.dtype) for value in present]),
            parallel_iterations=1,
        )
        remaining = iter(sums)
        return [None if v is None else next(remaining) for v in divisors.values]

    def _forward(self, x: Any, *, training: bool) -> Any:
        if self._model._call_has_training_arg:
            return self._model(x, training=training)
        return self._model(x)

    def _loss(self, **batch: Any) -> Any:
        return loss_of(self._model, **batch)

    def _begin(self) -> None:
        self._line.assign(False)
        self.snapshot.take()

    def _apply(self, gradients: list[Any], weights: list[Any]) -> None:
        """Writes the weights, after all gradients are there and the line is crossed.

        Everything the optimizer does waits for the line, also what does not depend on
        a gradient: its count of steps, for one, would otherwise advance in a step
        that fails.
        """
        if not weights:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(_tensors(present)):
            crossed = self._line.assign(True)
        with tf.control_dependencies([crossed]):
            self._model.optimizer.apply_gradients(
                zip(
                    [None if g is None else _identity(g) for g in gradients],
                    weights,
                    strict=True,
                )
            )


def _tensors(gradients: list[Any]) -> list[tf.Tensor]:
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _identity(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(gradient.values), gradient.indices, gradient.dense_shape
        )
    return tf.identity(gradient)
