"""What a person should know before a batch of their model is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from oomrun.worker.engine.separability import Separability

__all__ = ["of_a_cut"]


def of_a_cut(model: Any, found: Separability) -> Iterator[tuple[str, str]]:
    """Notes, each with a code, on what micro-batches mean for ``model``."""
    name = model.name
    if found is Separability.NONE:
        yield (
            "not-separable",
            f"the loss of {name} on a few samples is neither the mean nor the sum of "
            "its loss on parts of them: it compares samples of a batch with each "
            "other, or adds sums to means. Cut into micro-batches it would train "
            "another model, so its batches are not cut",
        )
        return
    if found is Separability.UNKNOWN:
        yield (
            "random-loss",
            f"the loss of {name} is random even when it does not train, so it could "
            "not be tried whether it is a mean over samples; it is taken for one",
        )
    layers = model._flatten_layers()
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        yield (
            "batch-norm",
            f"{name} has BatchNormalization: its statistics are those of each "
            "micro-batch, so a step in micro-batches is not exactly that of the whole "
            "batch. LayerNormalization or GroupNormalization would not depend on it",
        )
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        yield (
            "own-metrics",
            f"{name} has a compute_metrics of its own: of a step in micro-batches only "
            "Keras's own metrics are reported, not what it adds",
        )
