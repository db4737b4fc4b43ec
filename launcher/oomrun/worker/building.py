"""Making all variables of a model before its first step.

The engine must know them before it traces a step, and a checkpoint before it can be
restored. Keras makes them when the first batch is traced; the order, and so the random
numbers drawn for them, is the same here.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from oomrun.worker.engine import step

__all__ = ["from_batch", "from_spec"]


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
    _build(model, batch if isinstance(batch, tuple) else (batch,))


def _symbolic(spec: Any) -> Any:
    if spec is None:
        return None
    return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)


def from_batch(model: Any, data: Any) -> None:
    """Builds the model from a batch of tensors."""
    try:
        _build(model, data)
    except (RuntimeError, ValueError, TypeError):
        # It cannot be called with symbolic inputs: trace it, without running it.
        tf.function(lambda: _forward(model, data)).get_concrete_function()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)


def _forward(model: Any, data: Any) -> None:
    x, y, sample_weight = step.unpack(data)
    predictions = model(x)
    step.loss_of(model, x=x, y=y, y_pred=predictions, sample_weight=sample_weight)
    model.compute_metrics(x, y, predictions, sample_weight=sample_weight)


def _build(model: Any, batch: Any) -> None:
    model._symbolic_build(data_batch=step.unpack(batch))
