"""One operation at a time, in the same order each time.

TensorFlow's usual executor runs whatever is ready on several threads, so the peak of a
step differs from the next (measured: up to a quarter of it), and is higher than it
need be. Its single-threaded executor takes a step's operations in one order: on a CPU
device the peak is then the same at every step, to a few parts in a thousand, and the
operations themselves still use all cores.

Source of what is relied on: ``SingleThreadedExecutorImpl`` in
tensorflow/core/common_runtime: it cannot run control flow that was taken apart, as is
that of every graph that was traced for the usual executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["in_order", "ordered", "suits"]

_NAME = "SINGLE_THREADED_EXECUTOR"
_CONTROL_FLOW = frozenset(
    {
        "Case", "Enter", "Exit", "For", "If", "LoopCond", "Merge", "NextIteration",
        "StatelessCase", "StatelessIf", "StatelessWhile", "Switch", "While",
    }
)  # fmt: skip


def in_order() -> contextlib.AbstractContextManager[None]:
    """Functions that are called in here run one operation at a time."""
    return context.function_executor_type(_NAME)  # type: ignore[no-any-return]


def ordered(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` as one operation of a graph, whose own run in order."""
    function = tf.function(
        tf.autograph.experimental.do_not_convert(step),
        reduce_retracing=True,
        # It would not be in order where it is put into the graph that calls it.
        experimental_attributes={"_noinline": True},
    )

    def call(*given: Any) -> Any:
        with in_order():
            return function(*given)

    return call


def suits(graph: Any) -> bool:
    """Whether a step whose graph was traced as usual can be run ``in_order``."""
    operations = list(graph.get_operations())
    for function in graph._functions.values():
        operations += getattr(
            getattr(function, "graph", None), "get_operations", list
        )()
    return not any(operation.type in _CONTROL_FLOW for operation in operations)
