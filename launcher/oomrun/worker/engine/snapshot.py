"""Undoing what a failed step has changed.

A step that runs out of memory before its gradients are complete has changed no weight,
but layers may have updated statistics (BatchNorm), random generators their counters
(Dropout), and metrics their sums. Copies of these, taken before the step, are put back
before it is tried again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

__all__ = ["Snapshot", "mutable_variables"]

#: Layer state larger than this is not copied every step; such a model is recovered by
#: restarts from a checkpoint only.
MAX_SNAPSHOT_BYTES = 64 * 2**20


def mutable_variables(model: Any) -> list[Any]:
    """The variables a forward pass may change: layer state, random state, metrics.

    Weights of frozen layers are not among them, though Keras lists them as
    non-trainable: nothing in a step writes to them.
    """
    frozen = {
        id(variable)
        for layer in model._flatten_layers()
        for variable in getattr(layer, "_trainable_variables", ())
    }
    seen: set[int] = set()
    found = []
    for variable in [*model.non_trainable_variables, *model.metrics_variables]:
        if id(variable) not in frozen and id(variable) not in seen:
            seen.add(id(variable))
            found.append(variable)
    return found


class Snapshot:
    """Copies of a model's mutable variables, and of Keras's own random state."""

    def __init__(self, model: Any) -> None:
        self._variables = [variable.value for variable in mutable_variables(model)]
        size = sum(v.shape.num_elements() * v.dtype.size for v in self._variables)
        self.possible = size <= MAX_SNAPSHOT_BYTES
        if not self.possible:
            self._variables = []
        self._copies = [_copy(variable) for variable in self._variables]
        self._generator: Any = None
        self.grew()

    def grew(self) -> bool:
        """Adds what Keras draws from where a layer has no state of its own, once it is.

        It is made when it is first drawn from, in a step's trace, say. Not by us: its
        seed is drawn from Python's generator.

        Returns:
            Whether it was added now.
        """
        generator = global_state.get_global_attribute("global_seed_generator")
        if generator in (None, self._generator) or not self.possible:
            return False
        self._generator = generator
        self._variables.append(generator.state.value)
        self._copies.append(_copy(self._variables[-1]))
        return True

    def take(self) -> list[Any]:
        """Copies the values, inside a graph or eagerly, before a step.

        Returns:
            The operations that do, where they are put into a graph.
        """
        return [
            copy.assign(variable, read_value=False)
            for variable, copy in zip(self._variables, self._copies, strict=True)
        ]

    def restore(self) -> None:
        """Puts the values of the last ``take`` back."""
        for variable, copy in zip(self._variables, self._copies, strict=True):
            variable.assign(copy)


def _copy(variable: Any) -> tf.Variable:
    zeros = tf.zeros(variable.shape, variable.dtype)
    return tf.Variable(zeros, trainable=False, name="oomrun_undo")
