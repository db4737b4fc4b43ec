"""The line in a step before which no weight, and after which any may be written.

Everything of the optimizer waits until all gradients are there and the line is
crossed, also what depends on no gradient: its count of steps, for one, would otherwise
advance in a step that then fails (docs/decisions/0007).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Line"]


class Line:
    """A variable that counts how often a step has called an optimizer."""

    def __init__(self) -> None:
        self._variable = tf.Variable(0, trainable=False, name="oomrun_line")

    @property
    def crossed(self) -> bool:
        """Whether the last step that was begun had begun to write weights."""
        return self.crossings > 0

    @property
    def crossings(self) -> int:
        """The optimizers that the last step that was begun had got to."""
        return int(self._variable.numpy())

    def count(self) -> tf.Tensor:
        """The crossings so far, for what in the step must come after them."""
        return self._variable.read_value()

    def begin(self) -> None:
        """Sets it back; called in a graph or eagerly when a step begins."""
        self._variable.assign(0)

    @contextlib.contextmanager
    def after(self, gradients: Sequence[Any]) -> Iterator[list[Any]]:
        """Crosses the line after ``gradients``; gives them to what comes after it."""
        present = [g for g in gradients if g is not None]
        with tf.control_dependencies([_dense(g) for g in present]):
            crossed = self._variable.assign_add(1)
        with (
            tf.variable_creator_scope(_without_waiting),
            tf.control_dependencies([crossed]),
        ):
            yield [None if g is None else _behind(g) for g in gradients]


def _without_waiting(create: Callable[..., Any], **given: Any) -> Any:
    """Makes a variable, whose first value is computed outside of the step."""
    with tf.control_dependencies(None):
        return create(**given)


def _dense(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _behind(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(gradient.values), gradient.indices, gradient.dense_shape
        )
    return tf.identity(gradient)
