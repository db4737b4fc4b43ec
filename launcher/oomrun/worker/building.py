"""Making all variables of a model before its first step.

The engine must know them before it traces a step, and a checkpoint before it can be
restored. Keras makes them when the first batch is traced; the order, and so the random
numbers drawn for them, is the same here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from oomrun.worker.engine import attributes, cutting, models

__all__ = ["from_batch", "from_spec"]


# What Keras or a model's own code raises where it cannot be called with symbolic
# inputs, or has no ``call``: a GAN's.
_NOT_SYMBOLIC = (RuntimeError, ValueError, TypeError, NotImplementedError)


def from_spec(model: Any, spec: Any) -> None:
    """Builds the model from the shapes of its batches, where those say enough."""
    known = all(
        isinstance(item, tf.TensorSpec) and item.shape.rank is not None
        for item in keras.tree.flatten(spec)
        if item is not None
    )
    if not known:
        return  # ragged, sparse or of unknown rank: the first batch will do
    batch = keras.tree.map_structure(_symbolic, spec)
    with contextlib.suppress(*_NOT_SYMBOLIC):
        _build(model, batch if isinstance(batch, tuple) else (batch,))


def _symbolic(spec: Any) -> Any:
    if spec is None:
        return None
    return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)


def from_batch(model: Any, data: Any) -> None:
    """Builds the model from a batch of tensors."""
    try:
        _build(model, data)
        if not models.has_own_step(model):
            return
    except _NOT_SYMBOLIC:
        pass
    # Traced, and never run: what a step of the user's makes, only the step knows.
    with attributes.left_as_they_were(model):
        tf.function(
            lambda: cutting.whole_step(model, data, lambda call: None)
        ).get_concrete_function()


def _build(model: Any, batch: Any) -> None:
    inputs, *others = models.unpack(batch)
    if not all(layer.built for layer in model._flatten_layers()):
        # As a step calls it: Keras's own way leaves out what only training reaches.
        symbolic = keras.tree.map_structure(_symbolic_alike, inputs)
        with attributes.left_as_they_were(model):
            backend.compute_output_spec(model, symbolic, training=True)
    model._symbolic_build(data_batch=(inputs, *others))


def _symbolic_alike(value: Any) -> Any:
    if value is None:
        return None
    return keras.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))
