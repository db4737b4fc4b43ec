"""What a script's own classes keep in Python, put back after a trial.

Covers: the attributes of a model, its layers, its metrics and its loss: numbers, texts,
tensors, and what lists, dictionaries, sets and small arrays hold. Does not cover:
variables (``keeping.py``), and objects of other classes that they hold.

A trial takes the step, and a step may count or collect something in Python. With
``run_eagerly`` it does so at each batch; else when it is traced, and what it finds then
is in the graph for good. Either way a trial must not show.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["Attributes", "left_as_they_were"]

_PLAIN = (bool, int, float, str)
_MADE = (
    keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer,
    keras.Variable, tf.Module, tf.Variable, tf.types.experimental.PolymorphicFunction,
)  # fmt: skip
# Larger ones are data, not what a step counts.
_MOST_BYTES, _MOST_ITEMS = 2**20, 1000


@contextlib.contextmanager
def left_as_they_were(model: Any) -> Iterator[None]:
    """Puts back what the attributes hold now at the end."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.restore()


class Attributes:
    """What the attributes of a model's own classes hold now."""

    def __init__(self, model: Any) -> None:
        self._owners = [_Owner(owner) for owner in _owners(model)]
        self._held: dict[int, _Held] = {}
        for owner in self._owners:
            for value in owner.before.values():
                self._look_into(value)

    def _look_into(self, value: Any) -> None:
        """Notes what ``value`` holds, and what that holds."""
        if isinstance(value, tuple(_WAYS)) and id(value) not in self._held:
            if isinstance(value, np.ndarray) and value.nbytes > _MOST_BYTES:
                return
            self._held[id(value)] = _Held(value)
        elif not isinstance(value, tuple):
            return
        if not isinstance(value, np.ndarray) and len(value) <= _MOST_ITEMS:
            for item in value.values() if isinstance(value, dict) else value:
                self._look_into(item)

    def changed(self) -> bool:
        """Whether a number or a text is another, or something holds something else."""
        return any(owner.changed() for owner in self._owners) or any(
            held.changed() for held in self._held.values()
        )

    def restore(self) -> None:
        """Makes them hold again what they held.

        Where one has made a variable or a layer meanwhile, only numbers: by what else
        it has set it may know that these are there.
        """
        for owner in self._owners:
            owner.restore()
        for held in self._held.values():
            held.restore()


class _Owner:
    """An object, and what its attributes were."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._made = owner, _made(owner)
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        skipped = _of_keras()
        return {n: v for n, v in vars(self._owner).items() if n not in skipped}

    def changed(self) -> bool:
        now = vars(self._owner)
        return self._made == _made(self._owner) and any(
            isinstance(value, _PLAIN) and not _same(now.get(name), value)
            for name, value in self.before.items()
        )

    def restore(self) -> None:
        if self._made != _made(self._owner):
            counts = {n: v for n, v in self.before.items() if type(v) in (int, float)}
            vars(self._owner).update(counts)
            return
        # Around Keras, to which these are known already.
        for name in self._now().keys() - self.before.keys():
            del vars(self._owner)[name]
        vars(self._owner).update(self.before)


class _Held:
    """A list, dictionary, set or array, and what it held."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._copy, self._write = next(
            ways for kind, ways in _WAYS.items() if isinstance(value, kind)
        )
        self._before = self._copy(value)

    def changed(self) -> bool:
        now, before = self._copy(self._value), self._before
        if isinstance(now, np.ndarray):
            return not np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
        pairs = zip(_flat(now), _flat(before), strict=False)
        return len(now) != len(before) or not all(_same(*pair) for pair in pairs)

    def restore(self) -> None:
        if not self.changed():
            return
        if not isinstance(self._value, np.ndarray):
            known = {id(item) for item in _flat(self._before)}
            new = (v for v in _flat(self._value) if id(v) not in known)
            if any(map(_is_made, new)):
                return
        self._write(self._value, self._before)


def _write_list(value: Any, before: Any) -> None:
    list.__setitem__(value, slice(None), before)


def _write_deque(value: Any, before: Any) -> None:
    value.clear()
    value.extend(before)


def _write_dict(value: Any, before: Any) -> None:
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    kind.update(value, before)


def _write_set(value: Any, before: Any) -> None:
    set.clear(value)
    set.update(value, before)


#: How each kind is copied and written: around Keras's own lists and dictionaries, which
#: would look for layers in what is put into them.
_WAYS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    list: (list, _write_list),
    deque: (list, _write_deque),
    dict: (dict, _write_dict),
    set: (set, _write_set),
    np.ndarray: (np.array, np.copyto),
}


def _flat(value: Any) -> list[Any]:
    """What a list, set or dictionary holds, a dictionary's names as well."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    # A copy of a set may have another order.
    return sorted(value, key=id) if isinstance(value, set) else list(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return bool(one == other)
    return one is other


@functools.cache
def _of_keras() -> frozenset[str]:
    """Attributes that Keras keeps itself."""
    name = "oomrun"  # without one Keras would number the script's own otherwise
    layer, metric = keras.layers.Layer(name=name), keras.metrics.Metric(name=name)
    return frozenset(
        {*vars(layer), *vars(metric), *vars(keras.Model(name=name))}
        | {"_build_shapes_dict"}
    )


def _owners(model: Any) -> list[Any]:
    """The model, its layers, metrics and losses, but for Keras's own, each once."""
    compiled = getattr(getattr(model, "_compile_metrics", None), "metrics", ())
    losses = getattr(getattr(model, "_compile_loss", None), "_user_loss", None)
    found = [
        *model._flatten_layers(), *model.metrics, *compiled,
        *(v for v in keras.tree.flatten(losses) if isinstance(v, keras.losses.Loss)),
    ]  # fmt: skip
    own = [v for v in found if not str(type(v).__module__).startswith("keras.")]
    return list({id(owner): owner for owner in own}.values())


def _made(owner: Any) -> tuple[Any, ...]:
    """Another one once the owner has made itself variables, or layers."""
    layers = getattr(owner, "_layers", ())
    kept = ("_trainable_variables", "_non_trainable_variables", "_variables")
    return (
        getattr(owner, "built", True),
        [layer.built for layer in layers],
        [len(getattr(owner, name, ())) for name in kept],
        sum(map(_is_made, vars(owner).values())),
    )


def _is_made(value: Any) -> bool:
    if isinstance(value, list | tuple | set | dict):
        return any(isinstance(item, _MADE) for item in _flat(value)[:_MOST_ITEMS])
    return isinstance(value, _MADE)
