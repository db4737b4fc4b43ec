"""A model's ``train_step`` over a batch in parts, as if it had been one.

The step is run, as it stands, on one part after the other in a ``tf.while_loop``, with
its gradients as loop variables; what it gives to an optimizer is added up, and the
optimizer is called once, with the sum. A step with several optimizers (a GAN's) is run
in phases, one for each: a later phase runs the step again with the weights that the
step would have had at each place: the old ones until it reaches an optimizer of an
earlier phase, the new ones behind it.

Whether that is exact for a given step is found by trying (``trial.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from oomrun.worker.engine import (
    drawing,
    executor,
    lookups,
    losses,
    models,
    slicing,
    written,
)
from oomrun.worker.engine.applying import Apply, Tapes, intercepting, optimizers_of
from oomrun.worker.engine.gradients import GradientSum
from oomrun.worker.engine.returning import Logs, NotCuttableError, Returned, flat, specs
from oomrun.worker.engine.snapshot import Snapshot

__all__ = ["Batch", "Cutter", "Scouted", "Weights", "whole_step"]

Around = Callable[[Any, Any], contextlib.AbstractContextManager[Any]]
OnApply = Callable[[Apply, Sequence[Any]], None]


class _ReachedOptimizer(BaseException):
    """Ends a step in a phase that is over with it. No script's ``except`` gets it."""


@dataclass(frozen=True)
class Scouted:
    """What a step does, learned by tracing it without running it.

    Attributes:
        applies: its calls of optimizers, in order; their gradients are of a graph that
            is gone, good for shapes and kinds only.
        logs: dtype and shape of each value that it returns, by its path.
        returned: what it returns, for the form of it.
        divisors: of its losses, in order; also symbolic.
        draws: whether it draws random numbers.
        suits_order: whether its operations can be run one at a time.
    """

    applies: list[Apply]
    logs: dict[str, tf.TensorSpec]
    returned: Any
    divisors: losses.Divisors
    draws: bool
    suits_order: bool


@dataclass(frozen=True)
class Batch:
    """One batch while it is cut: inside a graph, or eager."""

    data: Any
    micro_batch_size: tf.Tensor

    @property
    def samples(self) -> tf.Tensor:
        """Rows, an int32 scalar."""
        return slicing.rows(self.data)

    @property
    def cut_samples(self) -> tf.Tensor:
        """Of them, those of the parts: a worker's or a device's own."""
        return self.samples

    @property
    def passes(self) -> tf.Tensor:
        """How many parts there are."""
        return -(-self.cut_samples // self.micro_batch_size)

    def start(self, index: tf.Tensor) -> tf.Tensor:
        """The first row of part ``index``."""
        return index * self.micro_batch_size

    def part(self, index: tf.Tensor) -> Any:
        """The rows of part ``index``; the last may have fewer."""
        start = self.start(index)
        stop = tf.minimum(start + self.micro_batch_size, self.samples)
        return slicing.take(self.data, start, stop)

    def whole(self) -> Batch:
        """All of its rows, where this is only a share of them."""
        return self


@dataclass
class Weights:
    """Weights before and after the optimizers of earlier phases."""

    old: list[tuple[Any, tf.Tensor]] = field(default_factory=list)
    new: dict[int, list[tuple[Any, tf.Tensor]]] = field(default_factory=dict)

    def note_old(self, variables: Sequence[Any]) -> None:
        self.old += [(v, tf.identity(v.value)) for v in variables]

    def note_new(self, phase: int, variables: Sequence[Any]) -> None:
        self.new[phase] = [(v, tf.identity(v.value)) for v in variables]

    def values(self) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
        """The values alone, to be handed to another graph."""
        new = [[value for _, value in self.new[phase]] for phase in sorted(self.new)]
        return [value for _, value in self.old], new

    @classmethod
    def of(cls, variables: Sequence[Sequence[Any]], values: Any) -> Weights:
        """From ``values``, and the variables of all phases."""
        old, new = values
        pairs = [
            list(zip(of_phase, found, strict=True))
            for of_phase, found in zip(variables, new, strict=False)
        ]
        earlier = [v for of_phase in variables[: len(new)] for v in of_phase]
        return cls(list(zip(earlier, old, strict=True)), dict(enumerate(pairs)))

    def put_old(self) -> None:
        for variable, value in self.old:
            variable.assign(value)

    def put_new(self, phase: int) -> None:
        for variable, value in self.new[phase]:
            variable.assign(value)


@dataclass(frozen=True)
class _Phase:
    """The passes that gather one optimizer's gradients."""

    number: int
    last: bool
    found: Scouted
    totals: list[tf.Tensor | None]
    weights: Weights

    @property
    def call(self) -> Apply | None:
        """The call of the optimizer; None for a step without one."""
        return self.found.applies[self.number] if self.found.applies else None


def whole_step(model: Any, data: Any, on_apply: Callable[[Apply], None]) -> Any:
    """The model's step over a whole batch, its optimizers' calls given to us."""
    with (
        intercepting(optimizers_of(model), on_apply),
        losses.tracking_shares(model, 1.0),
    ):
        return model.train_step(data)


class Cutter:
    """Runs the step of one model in parts.

    Args:
        model: built; its step may be its own.
        snapshot: of the model's mutable variables, taken before the step.
        compiled: compiles the pass over one part (XLA), or gives it back.
        sums: the losses are sums over samples, not means.
    """

    def __init__(
        self,
        model: Any,
        snapshot: Snapshot,
        *,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
        sums: bool = False,
    ) -> None:
        self._model, self._snapshot = model, snapshot
        self._compiled, self._sums = compiled, sums
        self._own = models.has_own_step(model)

    def scout(self, data: Any) -> Scouted:
        """Traces the step on ``data`` without running it; makes all its variables.

        Raises:
            NotCuttableError: what it does cannot be done in parts.
        """
        applies: list[Apply] = []
        divisors = losses.Divisors()
        graph = tf.__internal__.FuncGraph("oomrun_scout")
        with graph.as_default(), drawing.noting_draws() as drawn:
            tapes = Tapes(self._model.trainable_weights, None)
            data = slicing.of_any_length(data)
            logs = self._step(data, applies.append, tapes, 1.0, divisors)
            for call in applies:
                if not tapes.returned(call.gradients):
                    raise NotCuttableError(
                        "its train_step changes gradients before it gives them to the "
                        "optimizer (the optimizer's own clipnorm, global_clipnorm and "
                        "clipvalue can be cut)"
                    )
                if lookups.inexact(call.gradients, call.optimizer):
                    raise NotCuttableError(lookups.TWO_WAYS)
            written.check(graph, self._model)
            if self._own and not applies:
                raise NotCuttableError("its train_step calls no optimizer")
            return Scouted(
                applies,
                specs(logs),
                logs,
                divisors,
                draws=bool(drawn) or written.draws(graph),
                suits_order=executor.suits(graph),
            )

    def step(
        self,
        batch: Batch,
        on_apply: OnApply,
        around: Around | None = None,
        found: Scouted | None = None,
    ) -> Returned:
        """Trains on a batch, to be called in a graph or eagerly.

        Args:
            batch: the batch and how it is cut.
            on_apply: told of each call of an optimizer, with the gradients of the
                whole batch, once each, in order.
            around: opened with the first row and the rows of a part, around its pass.
            found: what the step does with such batches, where that is known.
        """
        found = found or self.scout(batch.part(tf.constant(0)))
        totals = self._total_divisors(batch, found.divisors)
        weights = Weights()
        last: Logs = {}
        mean: Logs = {}
        phases = max(1, len(found.applies))
        for number in range(phases):
            phase = _Phase(number, number == phases - 1, found, totals, weights)
            gradients, last, mean = self._phase(batch, phase, around)
            call = phase.call
            if call is None:
                continue
            if phase.last:
                on_apply(call, gradients)
                continue
            # The next phase begins as this one did.
            self._snapshot.restore()
            weights.note_old(call.variables)
            on_apply(call, gradients)
            weights.note_new(number, call.variables)
        return Returned(last, mean, found.returned)

    def passes(self, batch: Batch, number: int, weights: Weights) -> Any:
        """The passes over a batch for one optimizer, which is for the caller to call.

        Args:
            batch: the batch and how it is cut.
            number: which of the step's optimizers.
            weights: before and after the optimizers of earlier calls.

        Returns:
            The gradients of the whole batch, and of ``Returned`` last and mean.
        """
        found = self.scout(batch.part(tf.constant(0)))
        totals = self._total_divisors(batch, found.divisors)
        last = number == max(1, len(found.applies)) - 1
        return self._phase(batch, _Phase(number, last, found, totals, weights), None)

    def _phase(self, batch: Batch, phase: _Phase, around: Around | None) -> Any:
        """The sum of one optimizer's gradients over the parts, and the logs."""
        call = phase.call
        total = GradientSum(
            call.gradients if call else [],
            call.variables if call else [],
            batch.cut_samples,
            batch.micro_batch_size,
        )
        wanted = phase.found.logs if phase.last else {}

        def one(part: Any, start: tf.Tensor, whole: tf.Tensor) -> Any:
            entered = around(start, slicing.rows(part)) if around else None
            with entered or contextlib.nullcontext():
                return self._part(part, whole, phase)

        one_pass = self._compiled(one)

        def body(index: tf.Tensor, state: Any, last: Logs, mean: Logs) -> Any:
            part = batch.part(index)
            gradients, logs = one_pass(part, batch.start(index), batch.samples)
            share = _share(slicing.rows(part), batch.samples)
            mean = {n: mean[n] + logs[n] * tf.cast(share, logs[n].dtype) for n in mean}
            return index + 1, total.add(state, index, gradients), logs, mean

        zeros = {
            name: tf.zeros(spec.shape, spec.dtype) for name, spec in wanted.items()
        }
        counted = {n: v for n, v in zeros.items() if v.dtype.is_floating}
        _, state, last, mean = tf.while_loop(
            lambda index, *_: index < batch.passes,
            body,
            (tf.constant(0), total.zeros(), zeros, counted),
            parallel_iterations=1,  # two parts at once would need the memory of two
        )
        return total.result(state), last, mean

    def _part(self, data: Any, whole: tf.Tensor, phase: _Phase) -> Any:
        """One part's contribution to the gradient of the whole batch's loss."""
        samples = slicing.rows(data)
        share = _share(samples, whole)
        tapes = Tapes(self._model.trainable_weights, share)
        gradients: list[Any] = []

        def on_apply(call: Apply) -> None:
            if call.index < phase.number:
                phase.weights.put_new(call.index)
                return
            gradients.extend(call.gradients)
            if not phase.last:
                raise _ReachedOptimizer

        phase.weights.put_old()
        logs: Any = {}
        try:
            reductions = losses.Reductions(samples, whole, phase.totals)
            logs = self._step(data, on_apply, tapes, share, reductions)
        except _ReachedOptimizer:
            pass
        return gradients, {n: tf.convert_to_tensor(v) for n, v in flat(logs).items()}

    def _step(
        self,
        data: Any,
        on_apply: Callable[[Apply], None],
        tapes: Tapes,
        share: Any,
        observer: losses.Divisors | losses.Reductions,
    ) -> Any:
        model = self._model
        with (
            intercepting(optimizers_of(model), on_apply),
            tapes.watching(),
            losses.tracking_shares(model, share),
            losses.correcting(observer),
            models.loss_multiplied(model, 1.0 / share if self._sums else None),
        ):
            return model.train_step(data)

    def _total_divisors(
        self, batch: Batch, divisors: losses.Divisors
    ) -> list[tf.Tensor | None]:
        """Divisors of the whole batch: a pass over the parts ahead of the real one.

        For masks and weights they do not depend on the model's computation, and
        TensorFlow prunes that from the pass where nothing else needs it.
        """
        if not divisors.needed:
            return [None] * len(divisors.values)

        batch = batch.whole()

        def body(index: tf.Tensor, sums: Any) -> Any:
            seen = losses.Divisors()
            self._observe(batch.part(index), seen)
            present = [value for value in seen.values if value is not None]
            return index + 1, [a + b for a, b in zip(sums, present, strict=True)]

        present = [value for value in divisors.values if value is not None]
        _, sums = tf.while_loop(
            lambda index, *_: index < batch.passes,
            body,
            (tf.constant(0), [tf.zeros((), value.dtype) for value in present]),
            parallel_iterations=1,
        )
        # A layer may have counted this pass too.
        self._snapshot.restore()
        remaining = iter(sums)
        return [None if v is None else next(remaining) for v in divisors.values]

    def _observe(self, part: Any, seen: losses.Divisors) -> None:
        if not self._own:
            models.loss_of_part(self._model, part, seen)
            return
        tapes = Tapes(self._model.trainable_weights, None)
        self._step(part, lambda call: None, tapes, 1.0, seen)


def _share(part: Any, whole: Any) -> tf.Tensor:
    # 64 bits, also where the model computes in 32: it is cast where it is used.
    return tf.cast(part, tf.float64) / tf.cast(whole, tf.float64)
