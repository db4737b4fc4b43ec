"""A model's variables once more on another device, for passes that are made there.

Keras's variables are a name for a variable of TensorFlow. While a mirror is in use the
name stands for the copy on its device, so that whatever is called then, be it layers,
metrics or a ``train_step`` of the user's, reads and writes there. Outside of it the
model is an ordinary one, on the first device (docs/decisions/0025).

Source of what is relied on: ``Variable._value`` in keras/src/backend/common, 3.3 to
3.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import device as device_spec
from tensorflow.python.framework import ops

__all__ = ["Mirror", "placed"]


class Mirror:
    """One device of those that a model is trained on.

    Args:
        model: built.
        device: TensorFlow's name of it.
        first: it is the one that the model's own variables are on; none are made.
    """

    def __init__(self, model: Any, device: str, *, first: bool = False) -> None:
        self.device = device
        self._pairs: list[tuple[Any, Any, Any]] = []
        if first:
            return
        known: set[int] = set()
        for variable in [*model.variables, *model.metrics_variables]:
            own = variable.value
            if id(own) in known or own.dtype == tf.string:
                continue
            known.add(id(own))
            with tf.device(device):
                copy = tf.Variable(own, trainable=own.trainable, name="oomrun_mirror")
            self._pairs.append((variable, own, copy))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Operations are placed on the device; variables are those that are there."""
        for variable, _, copy in self._pairs:
            variable._value = copy
        try:
            with placed(self.device):
                yield
        finally:
            for variable, own, _ in self._pairs:
                variable._value = own

    def refresh(self, only: Iterable[Any] | None = None) -> None:
        """Gives the copies the values that the model has.

        Args:
            only: some of the model's variables; None: all.
        """
        chosen = None if only is None else {id(variable.value) for variable in only}
        with placed(self.device):
            for _, own, copy in self._pairs:
                if chosen is None or id(own) in chosen:
                    copy.assign(own)


def placed(device: str) -> contextlib.AbstractContextManager[Any]:
    """Places operations on ``device``, those of loops and functions within too.

    A device's name would not reach them: TensorFlow leaves what is inside of a loop to
    be placed later, on the first device. What decides on a device by a function is
    handed down, and is part of what a nested ``tf.function`` is traced anew for.
    """
    if tf.executing_eagerly():
        return tf.device(device)  # type: ignore[no-any-return]
    merging = device_spec.merge_device(device)
    return ops.get_default_graph().device(merging)  # type: ignore[no-any-return]
