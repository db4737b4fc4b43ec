"""Everything a step may change, kept on the host and put back after a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from oomrun.worker.engine.applying import optimizers_of

__all__ = [
    "bytes_by_kind", "bytes_of", "host_copy", "left_as_it_was", "variables_of",
]  # fmt: skip


def variables_of(model: Any) -> list[Any]:
    """Weights, layer state, seeds, the optimizers' slots and metrics, each once.

    In a fixed order: checkpoints are written and read by it.
    """
    found: dict[int, Any] = {}
    for variable in [
        *model.variables,
        *(v for optimizer in optimizers_of(model) for v in optimizer.variables),
        *model.metrics_variables,
    ]:
        found.setdefault(id(variable.value), variable)
    return list(found.values())


def bytes_of(variables: Iterable[Any]) -> int:
    """Bytes of the values of Keras variables."""
    return sum(v.value.shape.num_elements() * v.value.dtype.size for v in variables)


def bytes_by_kind(model: Any) -> dict[str, int]:
    """Bytes of ``variables_of`` a model, by what they are for."""
    optimizers = optimizers_of(model)
    kinds = {
        "trained_bytes": model.trainable_variables,
        "optimizer_bytes": [v for own in optimizers for v in own.variables],
        "fixed_bytes": model.variables,
    }
    left = {id(variable.value): variable for variable in variables_of(model)}
    found = {}
    for kind, variables in kinds.items():
        own = [left.pop(id(variable.value), None) for variable in variables]
        found[kind] = bytes_of(variable for variable in own if variable is not None)
    return {**found, "metrics_bytes": bytes_of(left.values())}


@contextlib.contextmanager
def left_as_it_was(variables: Sequence[Any]) -> Iterator[None]:
    """Puts the values that the variables have now back at the end."""
    # On the host: the device has no room for a second copy of everything.
    before = [host_copy(variable.value) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """The value of a tensor or variable, in memory of its own."""
    return np.array(tf.convert_to_tensor(value).numpy())
