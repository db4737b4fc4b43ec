"""What a loss function writes and draws, learned by tracing it without running it.

A variable that the loop does not keep is in no snapshot and no checkpoint: it cannot be
put back after a trial or a failed step, and is written once for each part of a batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from oomrun.worker.engine import drawing, written
from oomrun.worker.engine.objects import Objects

__all__ = ["LossScouted", "scout"]

# States of generators, of Keras's seeds and of ``tf.random.Generator``. They are
# advanced for each part, which draws numbers of its own then.
_GENERATORS = ("seed_generator_state", "StateVar")


@dataclass(frozen=True)
class LossScouted:
    """What is known of a loss function before it is tried.

    Attributes:
        unkept: a variable that it writes but the loop does not keep; empty for none.
        draws: whether it draws random numbers of TensorFlow's or Keras's.
    """

    unkept: str
    draws: bool


def scout(loss: Callable[[Any], Any], data: Any, objects: Objects) -> LossScouted:
    """Traces ``loss`` for ``data``."""
    graph = tf.__internal__.FuncGraph("oomrun_loss_scout")
    with graph.as_default(), drawing.noting_draws() as drawn:
        loss(data)
    draws = bool(drawn) or written.draws(graph)
    return LossScouted(_unkept(graph, objects), draws)


def _unkept(graph: Any, objects: Objects) -> str:
    kept = {id(variable.value.handle) for variable in objects.variables}
    for handle, inside in graph.captures:
        if handle.dtype != tf.resource or id(handle) in kept or not _writes(inside):
            continue
        name = _name_of(handle)
        if name and not name.endswith(_GENERATORS):
            return name
    return ""


def _writes(handle: Any) -> bool:
    """Whether an operation writes to it, or a branch, loop or function does."""
    return any(
        handle in auto_control_deps_utils.get_read_write_resource_inputs(operation)[1]
        for operation in handle.consumers()
    )


def _name_of(handle: Any) -> str:
    """The name of the variable that a handle is of; empty if it is of none.

    Neither the handle knows it, nor the graph if the variable is only written.
    """
    for thing in gc.get_objects():
        if not issubclass(type(thing), BaseResourceVariable):
            continue
        if getattr(thing, "handle", None) is handle:
            return str(thing.name).removesuffix(":0")
    return ""
