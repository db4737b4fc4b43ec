"""A worker that does not write knows all the same which model was the best."""

from __future__ import annotations

from pathlib import Path

import keras

from oomrun.worker import one_writer


def test_the_best_is_known_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "best.keras"
    callback = keras.callbacks.ModelCheckpoint(
        path, monitor="loss", save_best_only=True, mode="min", verbose=1
    )
    callback.set_model(model := keras.Sequential([keras.Input((2,))]))
    callback._set_monitor_op()
    decide = one_writer._deciding_only(keras.callbacks.ModelCheckpoint._save_model)
    for epoch, loss in enumerate((2.0, 1.0, 3.0)):
        decide(callback, epoch=epoch, batch=None, logs={"loss": loss})
    assert callback.best == 1.0
    assert not path.exists()
    assert (callback.model, callback.verbose) == (model, 1)
