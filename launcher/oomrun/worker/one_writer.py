"""Of the workers of a group only the first writes what a script's ``fit`` writes.

Covers: Keras's callbacks that write files, and saving a model: in all other workers
they do nothing. Does not cover: files that the script itself writes; ``OOMRUN_RANK``
tells it which worker it is in.
"""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["leave_writing_to_another"]

_WRITING = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor")
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
    for hook in _BACKUP:
        setattr(keras.callbacks.BackupAndRestore, hook, _nothing)
    for name in _SAVING:
        setattr(keras.Model, name, _nothing)


def _nothing(*args: Any, **named: Any) -> None:
    """The first worker does it."""


def _set_model(callback: Any, model: Any) -> None:
    callback._model = model
