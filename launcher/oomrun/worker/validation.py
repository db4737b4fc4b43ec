"""What validation keeps of a limited CPU device, there before sizes are tried.

Arrays that are validated with are copied to the device at the end of the first epoch,
and stay there until ``fit`` is done. A micro-batch that was planned without them may
have no room beside them: measured, 8 MiB of arrays took 8 or 16 of 160 MiB, and three
of nine trainings that went well until then ran out of memory in the second epoch. So
the iterator over them, which is the same for all epochs, is made when training's is.

Source of what is relied on: ``fit`` in keras/src/backend/tensorflow/trainer.py, 3.3 to
3.15, which makes that iterator once; ``train_validation_split``.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from oomrun.worker import pool

__all__ = ["Validation", "foreseen"]

# Keras's words for what an iterator is made over, in the order of ``validation_data``.
_DATA = ("x", "y", "sample_weight")


class Validation:
    """The iterator over a fit's validation arrays, made before Keras would make it.

    Args:
        data: x, y and weights of the samples; None where there are none.
        batch_size: as Keras will ask for it.
        steps: the same.
    """

    def __init__(
        self, data: tuple[Any, ...], batch_size: int | None, steps: int | None
    ) -> None:
        self._data = dict(zip(_DATA, data, strict=True))
        self._how = {"batch_size": batch_size, "steps_per_epoch": steps}
        self._again: Callable[[], Any] | None = None
        self._held = 0

    def make(
        self, model: Any, original: Callable[..., Any], training: dict[str, Any]
    ) -> None:
        """Makes it, and puts it where Keras keeps it between epochs.

        There nobody else finds it: a ``fit`` or ``evaluate`` within this one, over the
        same arrays, makes an iterator of its own.

        Args:
            model: that is trained.
            original: Keras's own epoch iterator.
            training: what that of training is made of.
        """
        others = ("distribute_strategy", "steps_per_execution")
        alike = {name: training[name] for name in others if name in training}
        again = functools.partial(
            original, **self._data, **self._how, **alike, shuffle=False
        )
        # Keras says what is wrong with data when it comes to them.
        with contextlib.suppress(TypeError, ValueError):
            model._eval_epoch_iterator = again()
            self._again, self._held = again, self._digest()

    def before_use(self, model: Any) -> None:
        """Called before each validation; makes an iterator over what has changed anew.

        Keras copies the arrays at the first one, and callbacks may write to them until
        then.
        """
        again, self._again = self._again, None
        if again is not None and self._held != self._digest():
            model._eval_epoch_iterator = None  # not both at once
            model._eval_epoch_iterator = again()

    def _digest(self) -> int:
        found = 0
        for leaf in keras.tree.flatten(self._data):
            if isinstance(leaf, np.ndarray):
                values = np.ascontiguousarray(leaf).reshape(-1)
                found = zlib.crc32(values.view(np.uint8).data, found)
        return found


def foreseen(arguments: dict[str, Any]) -> Validation | None:
    """What a call of ``fit`` will validate with in the midst of its training.

    Args:
        arguments: all of ``fit``'s. A split that it asks for is made here.

    Returns:
        None where nothing of it would stay on a device whose memory is limited, or not
        until a later epoch.
    """
    if pool.limit_bytes() is None or not _validates_before_the_end(arguments):
        return None
    if arguments["validation_split"] and arguments["validation_data"] is None:
        whole = tuple(arguments[name] for name in _DATA)
        if not _arrays(whole):
            return None
        kept, split = array_slicing.train_validation_split(
            whole, validation_split=arguments["validation_split"]
        )
        arguments.update(zip(_DATA, kept, strict=True))
        arguments.update(validation_data=split, validation_split=0.0)
    given = arguments["validation_data"]
    if not isinstance(given, tuple) or not 1 <= len(given) <= 3 or not _arrays(given):
        return None
    data = (*given, None, None)[:3]
    batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
    return Validation(data, batch_size, arguments["validation_steps"])


def _validates_before_the_end(arguments: dict[str, Any]) -> bool:
    """Whether an epoch of training comes after one that is validated."""
    first, end = arguments["initial_epoch"] or 0, arguments["epochs"]
    often = arguments["validation_freq"]
    epochs = range(first + 1, end)  # counted from 1, all but the last
    if isinstance(often, int):
        return often > 0 and any(epoch % often == 0 for epoch in epochs)
    return isinstance(often, list) and any(epoch in often for epoch in epochs)


def _arrays(data: Any) -> bool:
    """Whether these are held in memory, and reading them changes nothing."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return bool(leaves) and all(
        isinstance(leaf, tf.Tensor)
        # Not strings, say: these are no numbers in the device's memory.
        or (isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject)
        for leaf in leaves
    )
