"""The objects of a custom training loop, seen as the one model they stand for.

A loop trains models, optimizers, metrics, generators and bare variables that nothing
binds together. What undoes a step and what writes a checkpoint expects a Keras model:
``Objects`` has just those of its attributes that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

__all__ = ["Kept", "Objects"]

_KINDS = (
    "Keras models, layers, metrics, optimizers and seed generators, tf.Variable, "
    "tf.random.Generator, tf.Module, or lists and dictionaries of these"
)


@dataclass(frozen=True, eq=False)
class Kept:
    """A variable of TensorFlow, read and written as one of Keras."""

    value: tf.Variable
    path: str

    @property
    def shape(self) -> Any:
        """Its static shape."""
        return self.value.shape

    def assign(self, value: Any) -> None:
        """Writes it."""
        self.value.assign(value)


class Objects:
    """What a loop trains and keeps.

    Args:
        state: any nesting of the kinds of objects that have variables.
        optimizer: the optimizer of the loop's steps.
        trained: the variables to train, or layers whose trainable variables are meant;
            None for those of all models and layers in ``state``.

    Raises:
        TypeError: something in ``state`` or ``trained`` has no variables.
    """

    #: Asked for where a model is expected: no compiled loss tracks anything.
    _compile_loss = None

    def __init__(self, state: Any, optimizer: Any, trained: Any = None) -> None:
        self._things = [*_flat(state, "state"), optimizer]
        self._trained = None if trained is None else _flat(trained, "variables")
        self._of_optimizer = optimizer

    @property
    def things(self) -> list[Any]:
        """The objects, the optimizer behind all others."""
        return list(self._things)

    @property
    def kinds(self) -> list[str]:
        """The classes of the objects, in their order."""
        return [type(thing).__name__ for thing in self._things]

    # -- as a model ------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The one of the loop's steps."""
        return self._of_optimizer

    @property
    def variables(self) -> list[Kept]:
        """All variables of all objects, each once, in the order of the objects."""
        return _kept(v for thing in self._things for v in _variables(thing))

    @property
    def trainable_variables(self) -> list[Kept]:
        """The variables that the steps train."""
        return _kept(self.trained())

    @property
    def non_trainable_variables(self) -> list[Kept]:
        """What a forward pass may change: neither trained nor of the optimizer."""
        written = [*self.trained(), *_variables(self._of_optimizer)]
        frozen = [
            weight
            for layer in self._flatten_layers()
            for weight in getattr(layer, "_trainable_variables", ())
        ]
        others = {id(kept.value) for kept in _kept(iter([*written, *frozen]))}
        return [kept for kept in self.variables if id(kept.value) not in others]

    @property
    def metrics_variables(self) -> list[Kept]:
        """None beside those above: metrics are objects among the others."""
        return []

    def _flatten_layers(self) -> list[Any]:
        return [
            layer
            for thing in self._things
            if isinstance(thing, keras.Layer)
            for layer in thing._flatten_layers()
        ]

    def metric_of(self, kept: Kept) -> str:
        """The name of the metric that a variable is of; empty if it is of none."""
        metrics = [thing for thing in self._things if isinstance(thing, keras.Metric)]
        for layer in self._flatten_layers():
            metrics += getattr(layer, "_metrics", [])
        for metric in metrics:
            if any(kept.value is own.value for own in _kept(metric.variables)):
                return str(metric.name)
        return ""

    # -- as what a step trains -------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """All layers of all models, for what a person should know of them."""
        return self._flatten_layers()

    def trained(self) -> list[Any]:
        """The variables to train, as their owner has them.

        Raises:
            ValueError: there are none.
        """
        things = self._trained
        if things is None:
            things = [t for t in self._things if isinstance(t, keras.Layer | tf.Module)]
        found: dict[int, Any] = {}
        for thing in things:
            bare = isinstance(thing, tf.Variable | keras.Variable)
            for variable in [thing] if bare else thing.trainable_variables:
                found.setdefault(id(variable), variable)
        if not found:
            raise ValueError(
                "oomrun.Loop: nothing to train. Put the model into state=[...], or "
                "name what is to be trained with variables=[...]"
            )
        return list(found.values())

    def build(self, loss: Callable[[Any], Any], batch: Any) -> None:
        """Makes all variables, from a batch or the specs of one.

        Models of the user's own classes have none before they are called, nor has an
        optimizer before its first step. The order, and so the random numbers drawn for
        them, is that of a first step.
        """
        if not all(map(_is_built, [*self._flatten_layers(), *self._things])):
            traced = tf.function(lambda data: loss(data), autograph=False)
            traced.get_concrete_function(batch)
        if not self._of_optimizer.built:
            self._of_optimizer.build(self.trained())


def _is_built(thing: Any) -> bool:
    if isinstance(thing, keras.optimizers.Optimizer):
        return True  # by itself, below
    if isinstance(thing, keras.Metric):
        return bool(getattr(thing, "_built", True))
    return bool(getattr(thing, "built", True))


def _flat(things: Any, name: str) -> list[Any]:
    flat = list(keras.tree.flatten(things))
    for thing in flat:
        if thing is None or not _has_variables(thing):
            raise TypeError(
                f"oomrun.Loop: {name} holds {thing!r}, which has no variables. "
                f"It may hold {_KINDS}"
            )
    return flat


def _has_variables(thing: Any) -> bool:
    bare = tf.Variable | keras.Variable
    generator = tf.random.Generator | keras.random.SeedGenerator
    return isinstance(thing, bare | generator) or hasattr(thing, "variables")


def _variables(thing: Any) -> list[Any]:
    if isinstance(thing, tf.Variable | keras.Variable):
        return [thing]
    if isinstance(thing, tf.random.Generator | keras.random.SeedGenerator):
        return [thing.state]
    # Keras lists a compiled model's metrics apart.
    return [*thing.variables, *getattr(thing, "metrics_variables", ())]


def _kept(variables: Iterator[Any] | list[Any]) -> list[Kept]:
    found: dict[int, Kept] = {}
    for variable in variables:
        is_keras = isinstance(variable, keras.Variable)
        value = variable.value if is_keras else variable
        path = variable.path if is_keras else variable.name
        found.setdefault(id(value), Kept(value, path))
    return list(found.values())
