"""One optimizer step over a batch, whole or in micro-batches, with the same result.

The whole batch in one pass is the model's own step as it stands, Keras's or the
user's. In micro-batches it is the same step run on slices of the batch, with one call
of the optimizer after them (``cutting.py``): one trace for every micro-batch size.

Everything that decides the new weights is computed before the first variable is
written: ``StepFunction.applying`` tells on which side of that line a step failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from oomrun.worker import pool
from oomrun.worker.engine import (
    attributes,
    cutting,
    executor,
    models,
    separability,
    slicing,
    trial,
    written,
)
from oomrun.worker.engine.applying import Apply
from oomrun.worker.engine.beginning import Beginning
from oomrun.worker.engine.line import Line
from oomrun.worker.engine.returning import NotCuttableError
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import Snapshot
from oomrun.worker.engine.trainable import Flags

__all__ = ["Cut", "StepFunction"]

Logs = dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """How the batches of a model can be cut.

    Attributes:
        separability: how the loss of a batch follows from those of its parts.
        reason: why they cannot be cut; empty where they can.
        metrics: metrics that are those of the micro-batches then, by name.
        averaged: values the step returns that are means over a batch's samples.
        state: variables of layers that get other values then, by path.
        draws: whether the step draws random numbers, other ones for each part.
        suits_order: whether its operations can be run one at a time.
    """

    separability: Separability
    reason: str = ""
    metrics: tuple[str, ...] = ()
    averaged: frozenset[str] = frozenset()
    state: tuple[str, ...] = ()
    draws: bool = False
    suits_order: bool = False

    @property
    def possible(self) -> bool:
        """Whether a cut step is the step of the whole batch."""
        return self.separability is not Separability.NONE


class StepFunction:
    """The compiled steps of one model, as it was compiled.

    Args:
        model: a built and compiled Keras model, see ``models.cannot_step``.
        cut_as: another step of it, which says how batches are cut.
        xla: whether XLA compiles it, where the model asks for that.

    Attributes:
        by_xla: whether it does.
    """

    def __init__(
        self, model: Any, cut_as: StepFunction | None = None, *, xla: bool = True
    ) -> None:
        self._model, self._cut_as = model, cut_as
        self.by_xla = xla and bool(model.jit_compile) and not model.run_eagerly
        self.snapshot = Snapshot(model)
        self._line = Line()
        self._begin = Beginning(self._line, self.snapshot, eagerly=model.run_eagerly)
        self._flags = Flags(model)
        self._optimizers = 0
        self._spec: Any = None
        self._traced: set[str] = set()
        self._in_order = self._whole_in_order = self._at_once = False
        self._whole = self._compiled(self._whole_step)
        self._parts = self._compiled(self._split_step)
        self._cut: Cut | None = None
        self._seen: tuple[Any, cutting.Scouted | None] = (None, None)

    @property
    def applying(self) -> bool:
        """Whether the last step that failed had begun to write weights."""
        return self._line.crossed or self._at_once

    @property
    def lost(self) -> bool:
        """Whether the last step failed inside XLA, with all it had been given.

        Nothing more can be tried in this process. Measured: it was aborted.
        """
        return self._at_once

    @property
    def at_last_optimizer(self) -> bool:
        """Whether the last step that failed had all of its gradients."""
        return 0 < self._optimizers <= self._line.crossings

    def cut(self, data: Any) -> Cut:
        """How this model's batches can be cut, tried on the first rows of ``data``."""
        if self._cut is None:
            with self._flags.as_they_were(), attributes.left_as_they_were(self._model):
                self._cut = self._scouted(self._try(data), data)
        return self._cut

    def _scouted(self, found: Cut, data: Any) -> Cut:
        """``found``, with what a look at the step adds to it."""
        if not found.possible:
            return found
        try:
            seen = cutting.Cutter(self._model, self.snapshot).scout(data)
        except NotCuttableError as error:
            return Cut(Separability.NONE, str(error))
        except trial.UNTRACEABLE as error:
            return Cut(Separability.NONE, trial.cannot_trace(error))
        self._seen = (slicing.specs_of(data), seen)
        return dataclasses.replace(
            found, draws=seen.draws, suits_order=seen.suits_order
        )

    def _try(self, data: Any) -> Cut:
        model, found = self._model, Separability.UNKNOWN
        if reason := models.cannot_cut(model):
            return Cut(Separability.NONE, reason)
        if not models.has_own_step(model):
            try:
                found = self._try_loss(data)
            except trial.UNTRACEABLE as error:
                return Cut(Separability.NONE, trial.cannot_trace(error))
            if found is not Separability.NONE and models.has_own_loss(model):
                found = self._try_loss_of_all(data, found)
            if found is Separability.NONE:
                return Cut(found, separability.COMPARES)
            if found is not Separability.UNKNOWN and not models.needs_trial(model):
                return Cut(found)
        sums = found is Separability.SUM
        verdict = trial.try_step(model, data, self.snapshot, sums=sums)
        if verdict.reason:
            return Cut(Separability.NONE, verdict.reason)
        found = Separability.SUM if sums else Separability.MEAN
        return Cut(
            found,
            metrics=verdict.metrics,
            averaged=verdict.averaged,
            state=verdict.state,
        )

    def _try_loss(self, data: Any) -> Separability:
        tried = separability.on_some_rows(data, self._losses_of)
        if tried is None:
            # Not even two rows fit. Keras's own losses are means, or corrected.
            known = not models.has_own_loss(self._model)
            return Separability.MEAN if known else Separability.UNKNOWN
        whole, again, mean, total = tried
        tolerance = separability.tolerance(self._model)
        return separability.judge(whole, again, mean, total, tolerance=tolerance)

    def _losses_of(self, few: Any) -> tuple[float, ...]:
        def loss_of(part: Any, seen: Any) -> Any:
            return models.loss_of_part(self._model, part, seen)

        rows, traced = slicing.batch_size(few), not self._model.run_eagerly
        self.snapshot.take()
        try:
            return separability.trial(few, rows, loss_of, traced=traced)
        finally:
            self.snapshot.restore()

    def _try_loss_of_all(self, data: Any, found: Separability) -> Separability:
        """What all of the batch says of a loss of the user's; ``found`` if nothing."""
        model = self._model
        self.snapshot.take()
        try:
            tried = separability.trial_of_all(
                model, models.unpack(data), functools.partial(models.loss_of, model)
            )
        except trial.UNTRACEABLE:
            return found
        finally:
            self.snapshot.restore()
        if tried is None:
            return found
        whole, again, mean, total = tried
        if whole == 0 or not math.isfinite(whole):
            return Separability.NONE  # it shows nothing: whatever is cut may be wrong
        tolerance = separability.tolerance(model)
        return separability.judge(whole, again, mean, total, tolerance=tolerance)

    def graph_function(self) -> Any:
        """The concrete function of the whole step for batches of any size.

        It needs this object to live on. None where there is none: of steps that are
        run eagerly, or by XLA.
        """
        if self._model.run_eagerly or self.by_xla or self._spec is None:
            return None
        whole = self._whole = self._trace("whole", self._whole, self._whole_step)
        try:
            return whole.get_concrete_function(self._spec)
        except (TypeError, ValueError):
            return None

    def without_xla(self) -> StepFunction:
        """The same step as XLA is given it."""
        return self._another(self._spec, xla=False) if self.by_xla else self

    def for_trials(self) -> StepFunction:
        """A step of the same model that may be taken and undone.

        Another one where operations draw random numbers from generators that no
        variable holds: each traced function has its own.
        """
        function = self.graph_function()
        if function is None or not written.draws_by_kernel(function.graph):
            return self
        return self._another(self._spec)

    def for_spec(self, change: Callable[[Any], Any]) -> StepFunction:
        """A step of the same model for batches of another spec, made from its own."""
        if self._spec is None:
            return self
        spec = change(self._spec)
        alike = keras.tree.flatten(spec) == keras.tree.flatten(self._spec)
        return self if alike else self._another(spec)

    def _another(self, spec: Any, *, xla: bool = True) -> StepFunction:
        other = StepFunction(self._model, cut_as=self, xla=xla)
        other.trace_for(spec)
        return other

    def run_in_order(self, *, whole: bool) -> None:
        """From now on has a step's operations run one at a time (``executor.py``).

        Not those of steps that are run eagerly, or compiled by XLA.

        Args:
            whole: also those of a step over a whole batch. Its graph has more in it
                than a part's, the optimizer's branches for one, so ask ``suits``.
        """
        if self._model.run_eagerly or self.by_xla:
            return
        self._whole_in_order = self._whole_in_order or whole
        if self._in_order:
            return
        self._in_order = True
        # Traced anew: the graph says how a part is run.
        self._parts = self._compiled(self._split_step)
        self._traced.discard("parts")

    @property
    def _how_to_cut(self) -> Cut:
        return (self._cut_as or self)._cut or Cut(Separability.MEAN)

    def trace_for(self, spec: Any) -> None:
        """Has the steps traced for batches of ``spec``, as plain Keras has them.

        Otherwise the first batch's size would be in its shape, and a smaller last one
        be traced anew: Python values in the step would be read again, and operations
        that draw random numbers begin again.
        """
        self._spec = spec

    def _trace(self, name: str, function: Any, step: Any, *specs: Any) -> Any:
        """``function``, compiled of ``step``, traced before it is first called."""
        done = name in self._traced
        self._traced.add(name)
        if done or self._model.run_eagerly or self._spec is None:
            return function
        try:
            with self._flags.as_they_were():
                function.get_concrete_function(self._spec, *specs)
        except (TypeError, ValueError):
            # Batches that are unlike their spec are traced when they come, by another
            # one: made by half, it would return nothing, and not say why.
            return self._compiled(step)
        return function

    def run(self, data: Any, samples: int, micro_batch_size: int) -> Logs:
        """One optimizer step over ``data``.

        Args:
            data: the batch as Keras packs it, tensors with ``samples`` rows.
            samples: rows of the batch.
            micro_batch_size: rows a pass; fewer than ``samples`` only where ``cut``
                says that it is possible.

        Returns:
            The logs that the model's ``train_step`` would return.

        Raises:
            tf.errors.ResourceExhaustedError: see ``applying`` and ``snapshot``.
        """
        if micro_batch_size >= samples:
            self._whole = self._trace("whole", self._whole, self._whole_step)
            self._begin()
            in_order = executor.in_order() if self._whole_in_order else None
            # XLA is given the variables' own memory to write to: where it fails, they
            # may hold anything. Measured: weights that were no numbers.
            self._at_once = self.by_xla
            with in_order or contextlib.nullcontext():
                logs: Logs = self._whole(data)
            self._at_once = False
            return logs
        self._at_once = False
        # On a GPU operations are started one after the other anyway.
        if (
            not self._in_order
            and self._how_to_cut.suits_order
            and pool.limit_bytes() is not None
        ):
            self.run_in_order(whole=False)
        size = tf.TensorSpec((), tf.int32)
        self._parts = self._trace("parts", self._parts, self._split_step, size)
        self._begin()
        return self._parts(  # type: ignore[no-any-return]
            data, tf.constant(micro_batch_size, tf.int32)
        )

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return step
        return tf.function(  # type: ignore[no-any-return]
            tf.autograph.experimental.do_not_convert(step), reduce_retracing=True
        )

    def _by_xla(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The pass compiled by XLA where the model asks for it, or as it is."""
        if not self.by_xla:
            return step
        return tf.function(  # type: ignore[no-any-return]
            tf.autograph.experimental.do_not_convert(step),
            reduce_retracing=True,
            jit_compile=True,
        )

    def _whole_step(self, data: Any) -> Logs:
        on_apply: Callable[[Apply], None] = self._apply
        if self.by_xla:
            # All of it is one operation.
            on_apply = _apply_at_once

        def step(data: Any) -> Any:
            return cutting.whole_step(self._model, data, on_apply)

        return self._by_xla(step)(data)  # type: ignore[no-any-return]

    def _split_step(self, data: Any, micro_batch_size: tf.Tensor) -> Logs:
        cut = self._how_to_cut
        cutter = cutting.Cutter(
            self._model,
            self.snapshot,
            compiled=executor.ordered if self._in_order else self._by_xla,
            sums=cut.separability is Separability.SUM,
        )
        batch = cutting.Batch(data, micro_batch_size)
        # It is not traced once more for what is known of it.
        specs, seen = (self._cut_as or self)._seen
        alike = seen is not None and specs == slicing.specs_of(data)
        returned = cutter.step(batch, self._apply, found=seen if alike else None)
        logs: Logs = returned.logs(cut.averaged)
        return logs

    def _apply(self, call: Apply, gradients: Sequence[Any] | None = None) -> None:
        """Calls the optimizer behind the line, where nothing can be undone any more."""
        given = call.gradients if gradients is None else gradients
        self._optimizers = max(self._optimizers, call.index + 1)
        with self._line.after(given) as behind:
            call.really(behind)


def _apply_at_once(call: Apply) -> None:
    call.really(call.gradients)
