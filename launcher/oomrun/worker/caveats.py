"""What a person should know before a batch of their model is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from oomrun.worker.engine.step import Cut

__all__ = [
    "has_batch_norm",
    "of_a_cut",
    "of_metrics",
    "of_one_device",
    "of_prediction",
    "of_variables",
]


def has_batch_norm(model: Any) -> bool:
    """Whether statistics of the batch enter the model's step."""
    layers = model._flatten_layers()
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)


def of_a_cut(model: Any, found: Cut, batch_norm: str) -> Iterator[tuple[str, str]]:
    """Notes, each with a code, on what micro-batches mean for ``model``."""
    name = model.name
    if not found.possible:
        yield (
            "not-separable",
            f"the batches of {name} are not cut into micro-batches, since it would "
            f"train another model: {found.reason}",
        )
        return
    yield from of_metrics(name, found.metrics)
    if found.state:
        yield (
            "layer-state",
            f"{name} keeps {', '.join(found.state)}, which a layer writes in each "
            "pass: a step in micro-batches has more passes, and leaves other values",
        )
    if batch_norm != "freeze" and has_batch_norm(model):
        yield (
            "batch-norm",
            f"{name} has BatchNormalization: its statistics are those of each "
            "micro-batch, so a step in micro-batches is not exactly that of the whole "
            "batch. LayerNormalization or GroupNormalization would not depend on it; "
            "`batch: {batch_norm: freeze}` or `refuse` in the job file is exact",
        )
    if found.draws:
        yield (
            "random-layers",
            f"{name} draws random numbers (Dropout, noise): each micro-batch draws its "
            "own, so a step in micro-batches has others than the whole batch, of the "
            "same kind",
        )


def of_variables(model: Any) -> Iterator[tuple[str, str]]:
    """A note where the model keeps variables that no checkpoint has."""
    names = [
        f"{owner.name}.{name}"
        for owner in model._flatten_layers()
        for name, value in vars(owner).items()
        if isinstance(value, tf.Variable)
    ]
    if names:
        yield (
            "variables-not-saved",
            f"{', '.join(names)} of {model.name}: a tf.Variable, which Keras does not "
            "know, so after a restart it has its first value again. add_weight, or a "
            "keras.Variable, is saved",
        )


def of_one_device(name: str) -> tuple[str, str]:
    """Where there are several devices, and no share of a batch can be given to them."""
    return (
        "one-device",
        f"the batches of {name} cannot be shared out over several devices, so it "
        "trains on the first one alone; `strategy: single` needs no others",
    )


def of_metrics(name: str, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A note where metrics cannot be had from parts of a batch."""
    if metrics:
        yield (
            "metrics-of-micro-batches",
            f"{', '.join(metrics)} of {name} is not a sum or a mean over samples: "
            "what it reports of a batch that was cut is that of its micro-batches. "
            "The weights are not concerned",
        )


def of_prediction(name: str) -> tuple[str, str]:
    """The note where predictions of rows depend on the other rows."""
    return (
        "prediction-not-cut",
        f"a prediction of {name} depends on the other rows of its batch, or is not one "
        "for each row: its batches are not cut in predict. A smaller batch_size there "
        "needs less memory",
    )
