"""Keras's seed generators that belong to no model: a loss's own, or the script's.

Covers: knowing of all that are made, saving those that a checkpoint lacks, putting them
back. Does not cover: a layer's or a metric's own, which are variables of the model, and
the one that Keras keeps for all that has none (``randomness.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["follow", "restore", "save"]

#: All that are alive by what tells them apart in each process that runs the script:
#: name and first seed. Those alike are in the order in which they were made.
_made: dict[str, list[weakref.ref[Any]]] = {}


def follow() -> None:
    """Knows from now on of each generator that is made; called again, it forgets."""
    _made.clear()
    cls = keras.random.SeedGenerator
    original = getattr(cls.__init__, "__wrapped__", cls.__init__)

    @functools.wraps(original)
    def init(generator: Any, *args: Any, **kwargs: Any) -> None:
        original(generator, *args, **kwargs)
        key = _key(generator)
        if key is not None:
            _made.setdefault(key, []).append(weakref.ref(generator))

    cls.__init__ = init


def _key(generator: Any) -> str | None:
    """What tells it apart; None where its first seed is not to be known."""
    value = _value(generator)
    return None if value is None else f"{generator.name}: {value.tolist()}"


def _value(generator: Any) -> np.ndarray[Any, Any] | None:
    # Keras makes its variable later where it is asked to within some of its scopes.
    state = getattr(generator.state, "_value", None)
    if not isinstance(state, tf.Variable):
        return None
    with tf.init_scope():
        return np.array(state.numpy()) if tf.executing_eagerly() else None


def _alive() -> dict[str, list[Any]]:
    found = {key: [made() for made in all_made] for key, all_made in _made.items()}
    alive = {key: [g for g in all_of if g is not None] for key, all_of in found.items()}
    for key, all_of in alive.items():
        _made[key] = [weakref.ref(generator) for generator in all_of]
    return alive


def save(kept: Iterable[Any]) -> dict[str, list[Any]]:
    """The states of all but those whose variables are ``kept`` elsewhere.

    A list has a place for each generator that is alike, None for one that is kept.
    """
    others = {id(variable.value) for variable in kept}
    found = {}
    for key, generators in _alive().items():
        states = [
            None if id(generator.state.value) in others else _value(generator)
            for generator in generators
        ]
        if any(state is not None for state in states):
            found[key] = states
    return found


def restore(states: dict[str, list[Any]]) -> None:
    """Puts the states back that ``save`` returned.

    Those alike are left alone where there are not as many of them as there were: which
    of them is which is not known then.
    """
    alive = _alive()
    for key, values in states.items():
        generators = alive.get(key, [])
        if len(generators) == len(values):
            for generator, value in zip(generators, values, strict=True):
                if value is not None:
                    generator.state.assign(value)
