"""Of the workers of a group only the first writes what a script's ``fit`` writes.

Covers: Keras's callbacks that write files, and saving a model: in all other workers
they do nothing. Does not cover: files that the script itself writes; ``OOMRUN_RANK``
tells it which worker it is in.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

__all__ = ["leave_writing_to_another"]

_WRITING = ("CSVLogger", "TensorBoard", "RemoteMonitor")
# It also reads, and that all of them do.
_BACKUP = ("on_train_batch_end", "on_epoch_end", "on_train_end")
_SAVING = ("save", "save_weights", "export")


def leave_writing_to_another() -> None:
    """Has this process write nothing; called before the script runs."""
    for name in _WRITING:
        cls = getattr(keras.callbacks, name)
        for hook in dir(keras.callbacks.Callback):
            if hook.startswith("on_"):
                setattr(cls, hook, _nothing)
    keras.callbacks.TensorBoard.set_model = _set_model
    checkpoint: Any = keras.callbacks.ModelCheckpoint
    checkpoint._save_model = _deciding_only(checkpoint._save_model)
    for hook in _BACKUP:
        setattr(keras.callbacks.BackupAndRestore, hook, _nothing)
    for name in _SAVING:
        setattr(keras.Model, name, _nothing)


def _nothing(*args: Any, **named: Any) -> None:
    """The first worker does it."""


def _deciding_only(save_model: Any) -> Any:
    """``ModelCheckpoint._save_model``, which keeps which model was the best so far.

    The last checkpoint of the attempt may be of this worker, and holds its callbacks.
    """

    @functools.wraps(save_model)
    def decide(callback: Any, *args: Any, **named: Any) -> None:
        model, verbose = callback._model, callback.verbose
        callback._model, callback.verbose = _Unsaved(), 0
        try:
            save_model(callback, *args, **named)
        finally:
            callback._model, callback.verbose = model, verbose

    return decide


class _Unsaved:
    """What ``ModelCheckpoint`` saves in place of its model."""

    save = save_weights = _nothing


def _set_model(callback: Any, model: Any) -> None:
    callback._model = model
