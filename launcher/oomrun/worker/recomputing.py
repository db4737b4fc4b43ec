"""The lever ``recompute``: activations within groups of layers are computed again.

Covers: which layers may be computed twice, groups of them, and Keras calling a group in
their place. A chain of ``n`` layers is cut into about ``sqrt(n)`` groups: what is kept
are the activations between the groups and, for a moment, those of one group. In models
that are no chain each layer is a group of its own, which helps where layers are blocks.
Does not cover: models of which a class calls the layers by itself.

A layer with state that its call changes (BatchNormalization's statistics, the seed of a
Dropout) is never computed twice: its state would move twice, and its mask be another.
Source of what is relied on: keras/src/models/functional.py, keras/src/ops/function.py,
3.3 to 3.15; tensorflow/python/ops/custom_gradient.py.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from tensorflow.python.eager import record

__all__ = ["groups_of", "install"]

Group = tuple[Any, ...]

# What they return they also mark, with a mask that the next layers look for.
_MASKING = (keras.layers.Masking, keras.layers.Embedding, keras.layers.RNN)


def install(note: Callable[[str, str], None]) -> None:
    """From now on models compute so in training. To be called once a process.

    Args:
        note: tells a person something, once.
    """
    original = Functional.call
    known: weakref.WeakKeyDictionary[Any, list[Group] | None]
    known = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def call(
        model: Any, inputs: Any, training: Any = None, mask: Any = None, **more: Any
    ) -> Any:
        if not training or more or not _is_tensor(inputs) or mask is not None:
            return original(model, inputs, training=training, mask=mask, **more)
        if model not in known:
            known[model] = groups_of(model)
            note(*_said(model, known[model]))
        groups = known[model]
        if groups is None:
            return original(model, inputs, training=training)
        (outputs,) = model._standardize_inputs(inputs)
        for group in groups:
            outputs = _computed(group, training)(outputs)
        return outputs

    Functional.call = call


def groups_of(model: Any) -> list[Group] | None:
    """The layers of a chain in groups; None where the model is no chain.

    Only groups of two and more, and blocks, are computed twice; see ``_computed``.
    """
    layers = _chain(model)
    if layers is None:
        return None
    eligible = [_may_be_computed_twice(layer) for layer in layers]
    size = max(1, round(math.sqrt(sum(eligible))))
    groups: list[Group] = []
    group: list[Any] = []
    for layer, may in zip(layers, eligible, strict=True):
        if group and (not may or len(group) >= size):
            groups.append(tuple(group))
            group = []
        if may:
            group.append(layer)
        else:
            groups.append((layer,))
    if group:
        groups.append(tuple(group))
    return groups


def _chain(model: Any) -> list[Any] | None:
    """The layers, where each takes the one output of the one before it."""
    one = len(model._inputs) == 1 and len(model._outputs) == 1
    if not one or not isinstance(model._inputs_struct, keras.KerasTensor | list):
        return None
    at, layers = model._inputs[0], []
    operations = [node.operation for node in _nodes(model)]
    for node in _nodes(model):
        taken = node.arguments.keras_tensors
        layer = node.operation
        simple = len(taken) == 1 and len(node.outputs) == 1 and taken[0] is at
        named = node.arguments.kwargs
        more = [named[name] for name in named if name != "training"]
        plain = all(value is None for value in (*node.arguments.args[1:], *more))
        if not (simple and plain and isinstance(layer, keras.Layer)):
            return None
        layers.append(layer)
        at = node.outputs[0]
    whole = at is model._outputs[0] and len(set(map(id, operations))) == len(layers)
    return layers if whole and layers else None


def _nodes(model: Any) -> list[Any]:
    """Calls of layers, from the inputs to the outputs."""
    by_depth = model._nodes_by_depth
    ordered = [
        node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]
    ]
    return [node for node in ordered if not node.is_input]


def _may_be_computed_twice(layer: Any) -> bool:
    inner = layer._flatten_layers()
    if any(isinstance(part, _MASKING) for part in inner):
        return False
    # Statistics, seeds, whatever its call changes; losses that it would add twice.
    adds = any(
        part.activity_regularizer is not None for part in layer._flatten_layers()
    )
    return not layer.non_trainable_variables and not adds


def _is_block(layer: Any) -> bool:
    return len(list(layer._flatten_layers())) > 1


def _computed(group: Group, training: Any) -> Callable[[Any], Any]:
    """The layers of a group, one after the other."""

    def run(inputs: Any) -> Any:
        for layer in group:
            named = {"training": training} if layer._call_has_training_arg else {}
            inputs = layer(inputs, **named)
        return inputs

    many = len(group) > 1 or _is_block(group[0])
    twice = many and all(map(_may_be_computed_twice, group))
    return _twice(run) if twice else run


def _twice(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``run``, whose results in between are not kept for its gradients.

    Not ``tf.recompute_grad``: what ties its second run to the moment of the gradients
    is arithmetic on them, which Grappler finds to be nothing, so that it takes both
    runs for one and keeps all (measured: no byte was saved).
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def computed(inputs: Any) -> Any:
        with record.stop_recording():
            outputs = run(inputs)

        def gradient(above: Any, variables: Sequence[Any] = ()) -> Any:
            with tf.control_dependencies([above]):
                again = tf.identity(inputs)
            with tf.GradientTape() as tape:
                tape.watch(again)
                found = run(again)
            below, *others = tape.gradient(
                found, [again, *variables], output_gradients=above
            )
            return below, others

        return outputs, gradient

    return computed  # type: ignore[no-any-return]


def _is_tensor(inputs: Any) -> bool:
    """A tensor alone, and not a symbol of one."""
    if isinstance(inputs, Sequence) and len(inputs) == 1:
        inputs = inputs[0]
    return isinstance(inputs, tf.Tensor)


def _said(model: Any, groups: Sequence[Group] | None) -> tuple[str, str]:
    if groups is None:
        return (
            "recompute",
            f"the layers of {model.name} are no chain: the lever recompute does "
            "nothing for it (keras.RematScope in the script can)",
        )
    many = sum(len(group) > 1 or _is_block(group[0]) for group in groups)
    return (
        "recompute",
        f"{model.name} is computed in {len(groups)} groups of layers, "
        f"{many} of them twice",
    )
