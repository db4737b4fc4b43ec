"""One optimizer step of a custom loop: a loss function, whole or in micro-batches.

The loss function is the script's. It is given a batch or a part of one, and returns a
value for each sample, whose mean is the loss, or one scalar. What a whole batch's
gradient is follows from its parts: for values of samples by their sum over the whole
count, for a scalar as ``loss_cutting.py`` finds out by trying.

The whole batch in one pass is what a script writes by hand: a gradient tape and
``apply_gradients`` in one ``tf.function``. Micro-batches are one ``tf.while_loop`` with
the gradients as loop variables: one trace for every micro-batch size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oomrun.worker import pool
from oomrun.worker.engine import (
    cutting,
    executor,
    loss_cutting,
    losses,
    slicing,
    written,
)
from oomrun.worker.engine.beginning import Beginning
from oomrun.worker.engine.gradients import GradientSum
from oomrun.worker.engine.line import Line
from oomrun.worker.engine.objects import Objects
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import Snapshot

__all__ = ["LossStep"]


class LossStep:
    """The compiled step around one loss function.

    Args:
        loss: gives the loss of a batch.
        optimizer: a Keras optimizer.
        objects: what the step trains and may change; built.
        undoable: whether a failed step is to be undone; costs a copy of what a forward
            pass may change.
        spec: shapes and dtypes of a batch; None where nobody asks for its graph.
        cut_as: another step of it, which says how batches are cut.
    """

    #: What a step of a Keras model may be: compiled by XLA as a whole, and then lost
    #: with all it was given where it fails.
    by_xla = lost = False

    def __init__(
        self,
        loss: Callable[[Any], Any],
        optimizer: Any,
        objects: Objects,
        *,
        undoable: bool,
        spec: Any = None,
        cut_as: LossStep | None = None,
    ) -> None:
        self._loss, self._optimizer, self._objects = loss, optimizer, objects
        self._spec, self._cut_as = spec, cut_as
        self._weights = objects.trained()
        self._undoable = undoable
        self.snapshot = Snapshot(objects)
        self.line = Line()
        self._beginning = Beginning(self.line, self.snapshot, eagerly=False)
        self._cut: loss_cutting.Cut | None = None
        self._in_order = False
        self._whole = _compiled(self._whole_step)
        self._parts = _compiled(self._split_step)

    def run(self, data: Any, samples: int, micro_batch_size: int) -> tf.Tensor:
        """One optimizer step over ``data``.

        Args:
            data: the batch, tensors with ``samples`` rows.
            samples: rows of the batch.
            micro_batch_size: rows a pass; fewer than ``samples`` only where ``cut``
                allows it.

        Returns:
            The loss of the whole batch, a scalar.

        Raises:
            tf.errors.ResourceExhaustedError: see ``line`` and ``snapshot``.
        """
        self._begin()
        if micro_batch_size >= samples:
            in_order = executor.in_order() if self._in_order else None
            with in_order or contextlib.nullcontext():
                return self._whole(data)
        return self._parts(data, tf.constant(micro_batch_size, tf.int32))

    def cut(self, data: Any) -> loss_cutting.Cut:
        """How batches can be cut, tried on the first rows of ``data``."""
        if self._cut is None:
            cut = loss_cutting.find(self._loss, data, self._objects)
            if cut.divisors and not self.snapshot.possible:
                # They are found by a pass ahead, which has to be undone.
                cut = dataclasses.replace(cut, found=Separability.NONE)
            self._cut = cut
        return self._cut

    def graph_function(self) -> Any:
        """The concrete function of the whole step; None where there is none.

        It needs this object to live on.
        """
        if self._spec is None:
            return None
        try:
            function = self._whole.get_concrete_function(self._spec)
        except (TypeError, ValueError):
            return None
        outside = written.outside(function.graph, self._objects.variables)
        return None if outside else function

    def for_spec(self, change: Callable[[Any], Any]) -> LossStep:
        """The same step for batches of another spec, made from its own."""
        return self._another(None if self._spec is None else change(self._spec))

    def for_trials(self) -> LossStep:
        """A step that may be taken and undone, see ``StepFunction.for_trials``."""
        function = self.graph_function()
        if function is None or not written.draws_by_kernel(function.graph):
            return self
        return self._another(self._spec)

    def without_xla(self) -> LossStep:
        """Itself."""
        return self

    def _another(self, spec: Any) -> LossStep:
        return LossStep(
            self._loss, self._optimizer, self._objects, undoable=self._undoable,
            spec=spec, cut_as=self,
        )  # fmt: skip

    def run_in_order(self, *, whole: bool) -> None:
        """From now on runs a whole batch's operations one at a time.

        Those of a part are run so wherever that helps and can be.
        """
        self._in_order = self._in_order or whole

    @property
    def _how_to_cut(self) -> loss_cutting.Cut:
        cut = (self._cut_as or self)._cut
        assert cut is not None
        return cut

    def _whole_step(self, data: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_cutting.mean(self._loss(data), data)
            scaled = self._optimizer.scale_loss(loss)
        self._apply(tape.gradient(scaled, self._weights))
        return loss

    def _split_step(self, data: Any, micro_batch_size: tf.Tensor) -> tf.Tensor:
        batch = cutting.Batch(data, micro_batch_size)
        loss, _, gradients = self._passes(batch)
        self._apply(gradients)
        return loss

    def _passes(self, batch: cutting.Batch) -> tuple[tf.Tensor, list[Any], list[Any]]:
        """What the parts of ``batch`` add to the whole's loss, and to its gradients.

        Returns:
            The loss, one part's gradients, and the sums of them.
        """
        samples, passes = batch.samples, batch.passes
        divisors, dtype, example, suits = self._scout(batch.part)
        whole = batch.whole()
        totals = self._total_divisors(whole.part, whole.passes, divisors)
        total = GradientSum(
            example, self._weights, batch.cut_samples, batch.micro_batch_size
        )
        in_order = suits and pool.limit_bytes() is not None
        one_pass = executor.ordered(self._part) if in_order else self._part

        def body(index: tf.Tensor, loss: tf.Tensor, *state: Any) -> Any:
            value, gradients = one_pass(batch.part(index), samples, totals)
            return (index + 1, loss + value, *total.add(state, index, gradients))

        _, loss, *state = tf.while_loop(
            lambda index, *_: index < passes,
            body,
            (tf.constant(0), tf.zeros((), dtype), *total.zeros()),
            parallel_iterations=1,  # two parts at once would need the memory of two
        )
        return loss, example, total.result(state)

    def _part(
        self, data: Any, whole: tf.Tensor, totals: list[tf.Tensor | None]
    ) -> tuple[tf.Tensor, list[Any]]:
        """What a part adds to the loss of the whole batch, and to its gradients."""
        cut = self._how_to_cut
        samples = slicing.rows(data)
        reductions = loss_cutting.Reductions(samples, whole, totals)
        share = tf.cast(samples, tf.float64) / tf.cast(whole, tf.float64)
        with tf.GradientTape() as tape:
            with (
                loss_cutting.correcting(reductions if cut.corrected else None),
                losses.tracking_shares(self._objects, share),
            ):
                loss = loss_cutting.mean(self._loss(data), data)
            if cut.found is not Separability.SUM:
                loss *= tf.cast(share, loss.dtype)
            scaled = self._optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self._weights)

    def _scout(
        self, part: Callable[[tf.Tensor], Any]
    ) -> tuple[losses.Divisors, tf.DType, list[Any], bool]:
        """Traces one part without running it.

        Returns:
            Its losses, their dtype, its gradients' kinds, and whether its operations
            can be run one at a time.
        """
        divisors = losses.Divisors()
        graph = tf.__internal__.FuncGraph("oomrun_scout")
        with graph.as_default():
            data = part(tf.constant(0))
            with tf.GradientTape() as tape, losses.correcting(divisors):
                loss = loss_cutting.mean(self._loss(data), data)
            gradients = tape.gradient(loss, self._weights)
        return divisors, loss.dtype, gradients, executor.suits(graph)

    def _total_divisors(
        self,
        part: Callable[[tf.Tensor], Any],
        passes: tf.Tensor,
        divisors: losses.Divisors,
    ) -> list[tf.Tensor | None]:
        """Divisors of the whole batch, by a pass over the parts ahead of the real one.

        Only Keras's own losses over masks or weights have them. What the pass changes
        is put back.
        """
        if not (self._how_to_cut.corrected and divisors.needed):
            return [None] * len(divisors.values)

        def body(index: tf.Tensor, *sums: tf.Tensor) -> Any:
            seen = losses.Divisors()
            with losses.correcting(seen):
                self._loss(part(index))
            present = [value for value in seen.values if value is not None]
            return (index + 1, *[a + b for a, b in zip(sums, present, strict=True)])

        present = [value for value in divisors.values if value is not None]
        _, *sums = tf.while_loop(
            lambda index, *_: index < passes,
            body,
            (tf.constant(0), *[tf.zeros((), value.dtype) for value in present]),
            parallel_iterations=1,
        )
        self.snapshot.restore()
        remaining = iter(sums)
        return [None if v is None else next(remaining) for v in divisors.values]

    def _begin(self) -> None:
        if self._undoable:
            self._beginning()

    def _apply(self, gradients: list[Any]) -> None:
        if not self._undoable:
            self._optimizer.apply_gradients(zip(gradients, self._weights, strict=True))
            return
        with self.line.after(gradients) as behind:
            self._optimizer.apply_gradients(zip(behind, self._weights, strict=True))


def _compiled(step: Callable[..., tf.Tensor]) -> Any:
    # The script's own part is converted by itself; ours is not to be.
    return tf.function(
        tf.autograph.experimental.do_not_convert(step), reduce_retracing=True
    )
