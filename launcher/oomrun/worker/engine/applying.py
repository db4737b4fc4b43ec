"""A step's optimizers, and standing between them and the step that calls them.

A step ends in calls of ``apply`` or ``apply_gradients``, of one optimizer or several.
Cut into parts, it must not reach them before the gradients of all parts are there, so
while a step is traced the calls come to us instead. What the step gives them must be
what a gradient tape returned: a gradient that was changed on the way (clipped, say)
is not a sum over samples any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

__all__ = ["Apply", "Tapes", "intercepting", "optimizers_of"]


@dataclass(frozen=True)
class Apply:
    """One call of an optimizer in a step.

    Attributes:
        index: which of the step's calls it is, from 0.
        optimizer: the one that is called.
        gradients: per variable a tensor, IndexedSlices or None.
        variables: the weights that it is to change.
        really: calls the optimizer with gradients for the variables.
    """

    index: int
    optimizer: Any
    gradients: list[Any]
    variables: list[Any]
    really: Callable[[Sequence[Any]], Any]


def optimizers_of(model: Any) -> list[Any]:
    """The compiled optimizer, and those that the model keeps beside it."""
    found: list[Any] = []
    kept = keras.tree.flatten([model.optimizer, *map(_plain, vars(model).values())])
    for value in kept:
        if isinstance(value, keras.optimizers.Optimizer) and not any(
            value is other for other in found
        ):
            found.append(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, keras.optimizers.Optimizer):
        return value
    if isinstance(value, dict):
        return [v for v in value.values() if isinstance(v, keras.optimizers.Optimizer)]
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, keras.optimizers.Optimizer)]
    return None


@contextlib.contextmanager
def intercepting(
    optimizers: Sequence[Any], on_apply: Callable[[Apply], None]
) -> Iterator[None]:
    """Has ``on_apply`` called in place of the optimizers while the block runs."""
    calls = 0
    within = False

    def replaced(optimizer: Any) -> Callable[..., Any]:
        original = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            nonlocal calls, within
            if within:  # an optimizer that wraps another one
                return original(grads, trainable_variables)
            gradients = list(grads)
            if trainable_variables is None:
                variables = list(optimizer._trainable_variables)
            else:
                variables = list(trainable_variables)
                if not optimizer.built:
                    optimizer.build(variables)

            def really(values: Sequence[Any]) -> Any:
                nonlocal within
                within = True
                try:
                    return original(list(values), variables)
                finally:
                    within = False

            call = Apply(calls, optimizer, gradients, variables, really)
            calls += 1
            on_apply(call)
            return None

        return apply

    for optimizer in optimizers:
        vars(optimizer)["apply"] = replaced(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            del vars(optimizer)["apply"]


class Tapes:
    """Scales what gradient tapes return by a part's share, and knows it again.

    Args:
        weights: the model's trainable weights.
        share: the part's samples of the batch's, a scalar tensor; None: not scaled.
    """

    def __init__(self, weights: Sequence[Any], share: tf.Tensor | None) -> None:
        self._weights = {id(weight) for weight in weights}
        self._share = share
        self._returned: list[Any] = []

    def returned(self, gradients: Sequence[Any]) -> bool:
        """Whether all of them are as a tape has returned them."""
        known = {id(gradient) for gradient in self._returned}
        return all(g is None or id(g) in known for g in gradients)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follows all tapes while the block runs."""
        original = tf.GradientTape.gradient

        def gradient(
            tape: Any, target: Any, sources: Any, output_gradients: Any = None,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if output_gradients is None and self._share is not None:
                output_gradients = self._scale(target, sources, self._share)
            found = original(tape, target, sources, output_gradients, *args, **kwargs)
            self._returned += keras.tree.flatten(found)
            return found

        tf.GradientTape.gradient = gradient
        try:
            yield
        finally:
            tf.GradientTape.gradient = original

    def _scale(self, target: Any, sources: Any, share: tf.Tensor) -> Any:
        """The share, for gradients of means over samples; None for all others."""
        weights = all(id(source) in self._weights for source in _flat(sources))
        means = all(
            tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating
            for value in _flat(target)
        )
        if not weights or not means:
            return None
        return keras.tree.map_structure(lambda v: tf.cast(share, v.dtype), target)


def _flat(value: Any) -> list[Any]:
    return keras.tree.flatten(value)  # type: ignore[no-any-return]
