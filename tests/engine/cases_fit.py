"""Rows: ``fit``'s own arguments, several fits in a script, callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks

from engine.registry import row, section
from engine.samples import (
    BATCH,
    COUNT,
    classes,
    classifier,
    compiled,
    dataset,
    dense,
    fit,
    regression,
    weights,
)

section("`fit`")


@row("`validation_data` as arrays with weights")
def validation_data(folder: Path) -> Any:
    model = compiled("adam", weighted_metrics=["mae"])
    x, y = regression(13)
    history = fit(model, *regression(), validation_data=(x, y, weights(13)))
    return history, model


@row("`validation_data` as `tf.data`, with `validation_steps`", slow=True)
def validation_dataset(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    data = dataset(*regression())
    return fit(model, data, validation_data=data.repeat(), validation_steps=2), model


@row("`validation_split`, `validation_batch_size`")
def validation_split(folder: Path) -> Any:
    model = classifier(metrics=["accuracy"])
    given = {"validation_split": 0.4, "validation_batch_size": 5}
    return fit(model, *classes(), **given), model


@row("`validation_freq`, as a number and as a list")
def validation_freq(folder: Path) -> Any:
    model = compiled()
    data = regression()
    every = fit(model, *data, epochs=3, validation_data=data, validation_freq=2)
    some = fit(model, *data, epochs=3, validation_data=data, validation_freq=[1, 3])
    return every, some, model


@row("`initial_epoch`")
def initial_epoch(folder: Path) -> Any:
    model = compiled("adam")
    return fit(model, *regression(), initial_epoch=3, epochs=5), model


@row("`steps_per_epoch` less than the data")
def steps_per_epoch(folder: Path) -> Any:
    model = compiled("adam")
    return fit(model, *regression(), steps_per_epoch=2, epochs=1), model


@row("two `fit` calls in one script")
def two_fits(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    return fit(model, *regression()), fit(model, *regression(), epochs=1), model


@row("a model compiled twice, with another loss")
def compiled_twice(folder: Path) -> Any:
    model = compiled("adam")
    first = fit(model, *regression())
    model.compile("sgd", "mae", metrics=["mse"])
    return first, fit(model, *regression()), model


@row("fine-tuning: trained frozen, thawed, compiled again")
def fine_tuning(folder: Path) -> Any:
    model = dense()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    first = fit(model, *regression())
    model.layers[0].trainable = True
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    return first, fit(model, *regression()), model


@row("a loop of models (k-fold)")
def k_fold(folder: Path) -> Any:
    x, y = regression()
    found = []
    for fold in np.array_split(np.arange(COUNT), 2):
        rest = np.setdiff1d(np.arange(COUNT), fold)
        model = compiled("adam")
        fit(model, x[rest], y[rest])
        found += [model.evaluate(x[fold], y[fold], verbose=0), model]
    return found


@row("saved, loaded and trained on")
def saved_and_loaded(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    fit(model, *regression(), epochs=1)
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    return fit(loaded, *regression(), epochs=1), loaded


@row("batches of one sample", cuts=False, tolerance=0)
def batch_of_one(folder: Path) -> Any:
    model = compiled("adam")
    return fit(model, *regression(3), batch_size=1), model


section("Callbacks")


def _called(*given: Any, model: Any = None, **more: Any) -> Any:
    model = model or compiled(keras.optimizers.SGD(0.1), metrics=["mae"])
    more.setdefault("validation_data", regression(10))
    return fit(model, *regression(), callbacks=list(given), **more), model


@row("EarlyStopping with `restore_best_weights`")
def early_stopping(folder: Path) -> Any:
    stop = callbacks.EarlyStopping(patience=1, min_delta=1, restore_best_weights=True)
    return _called(stop, epochs=6)


@row("ReduceLROnPlateau")
def reduce_lr(folder: Path) -> Any:
    return _called(callbacks.ReduceLROnPlateau(patience=1, min_delta=1), epochs=4)


@row("LearningRateScheduler", slow=True)
def lr_scheduler(folder: Path) -> Any:
    return _called(callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5))


@row("ModelCheckpoint, every epoch and every few batches")
def model_checkpoint(folder: Path) -> Any:
    best = folder / "best.weights.h5"
    found = _called(
        callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
        callbacks.ModelCheckpoint(folder / "{batch:02d}.keras", save_freq=2),
    )
    names = sorted(path.name for path in folder.iterdir())
    model = compiled()
    model.load_weights(best)
    return found, names, model.get_weights()


@row("BackupAndRestore")
def backup_and_restore(folder: Path) -> Any:
    return _called(callbacks.BackupAndRestore(folder / "backup"))


@row("TensorBoard")
def tensor_board(folder: Path) -> Any:
    board = callbacks.TensorBoard(folder, update_freq=1, histogram_freq=1)
    found = _called(board)
    return found, [_scalars(path) for path in sorted(folder.rglob("*.v2"))]


def _scalars(path: Path) -> Any:
    """The numbers written, by step and tag; not the times of steps."""
    found = {}
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            array = tf.make_ndarray(value.tensor)
            if "per_second" not in value.tag and array.dtype.kind == "f":
                found[f"{event.step} {value.tag}"] = array.astype("float32")
    return found


@row("CSVLogger", slow=True)
def csv_logger(folder: Path) -> Any:
    found = _called(callbacks.CSVLogger(folder / "log.csv"))
    lines = (folder / "log.csv").read_text().splitlines()
    return found, lines[0], [[float(f) for f in line.split(",")] for line in lines[1:]]


@row("LambdaCallback", slow=True)
def lambda_callback(folder: Path) -> Any:
    seen: list[float] = []
    watch = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])
    )
    return _called(watch), seen


@row("SwapEMAWeights")
def swap_ema(folder: Path) -> Any:
    model = compiled(keras.optimizers.Adam(0.01, use_ema=True))
    return _called(callbacks.SwapEMAWeights(swap_on_epoch=True), model=model)


@row("TerminateOnNaN", slow=True)
def terminate_on_nan(folder: Path) -> Any:
    model = compiled()
    x, y = regression()
    y[BATCH + 1] = np.nan
    watch = callbacks.TerminateOnNaN()
    history = fit(model, x, y, shuffle=False, callbacks=[watch])
    return history, int(model.optimizer.iterations)


class Watching(callbacks.Callback):  # type: ignore[misc]
    """A user's own, with every hook; changes the rate and stops in mid-epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append(sorted(self.params))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        iterations = int(self.model.optimizer.iterations)
        self.seen.append([batch, iterations, *logs.values()])
        if iterations == 5:
            self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([batch, *logs.values()])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = regression(7)
        self.seen.append(self.model.predict(x, verbose=0))
        self.seen.append(self.model.evaluate(x, y, verbose=0))

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append(sorted(logs))


@row("a user's own, with batch hooks, `predict` and `evaluate`")
def own_callback(folder: Path) -> Any:
    watching = Watching()
    return _called(watching), watching.seen


@row("a `CallbackList` instead of a list", slow=True)
def callback_list(folder: Path) -> Any:
    model = compiled(metrics=["mae"])
    given = callbacks.CallbackList([callbacks.History()], model=model)
    x, y = regression()
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=given)
    return model, model.history
