"""oomrun's hooks on Keras, around what is not a plain batch on one device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.harness import Engine
from oomrun.core import events as ev

STRATEGIES = """
import sys
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
x = np.random.RandomState(0).normal(size=(40, 5)).astype("float32")
y = x.sum(1, keepdims=True)
found = []
for strategy in (
    tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    tf.distribute.OneDeviceStrategy("CPU:0"),
):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(7, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    told = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
    found += [*model.get_weights(), *map(np.array, told.history.values())]
    found += [np.array(model.evaluate(x, y, batch_size=8, verbose=0))]
    found += [model.predict(x, batch_size=8, verbose=0)]
np.savez(sys.argv[1], *found)
"""


def test_a_strategy_of_the_script_trains_as_it_does_plain(tmp_path: Path) -> None:
    """With several replicas, Keras's own functions; with one, the engine's."""
    job = jobs.make(tmp_path / "job", STRATEGIES, 'args: ["end.npz"]\ndevices: cpu\n')
    assert job.run() == 0, job.everything()

    plain = tmp_path / "plain.npz"
    jobs.python(job.folder / "train.py", str(plain), cwd=job.folder)
    # Not to the last bit: only one of the two has oneDNN's kernels.
    assert jobs.distance(job.folder / "end.npz", plain) < 1e-5
    assert all(np.isfinite(array).all() for array in jobs.arrays(plain))
    notes = [note.text for note in job.events(ev.Noted) if note.code == "not-split"]
    assert len(notes) == 1
    assert "in a MirroredStrategy of its own" in notes[0]
    assert [fit.micro_batch_size for fit in job.events(ev.FitStarted)] == [None, 8]


@contextlib.contextmanager
def hooked(folder: Path) -> Iterator[tuple[Engine, list[ev.Event]]]:
    """Keras in this process with our hooks; the events are there at the end."""
    engine, events = Engine(folder), list[ev.Event]()
    try:
        with engine.on(None):
            yield engine, events
    finally:
        events += engine.close()


X = np.random.RandomState(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def _compiled(kind: type[keras.Model] = keras.Model) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


class PerSample(keras.Model):
    """Its step returns the loss of each sample, not their mean."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(self(x, training=True) - y), 1)
            loss = tf.reduce_mean(losses)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": losses}


@pytest.mark.parametrize("kind", [keras.Model, PerSample])
def test_the_history_of_a_step_is_the_one_that_keras_keeps(
    tmp_path: Path, kind: type[keras.Model]
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "verbose": 0}
    plain = _compiled(kind).fit(X, Y, **options).history

    with hooked(tmp_path):
        ours = _compiled(kind).fit(X, Y, **options).history

    assert list(ours) == list(plain)
    for name in plain:
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-6)


def test_a_list_of_callbacks_is_left_as_it_was_given(tmp_path: Path) -> None:
    """Else the callback of an earlier fit would report and save in later ones."""
    model = _compiled()
    history = keras.callbacks.History()
    callbacks = keras.callbacks.CallbackList([history], model=model)

    with hooked(tmp_path) as (engine, events):
        for _ in range(2):
            model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

    assert callbacks.callbacks == [history]
    assert engine.session.step == 12
    ended = [event.step for event in events if isinstance(event, ev.FitEnded)]
    assert ended == [6, 12]


def test_our_callback_sees_each_batch_in_the_thread_that_trains(tmp_path: Path) -> None:
    """A checkpoint made in another one would hold half of the next step."""
    threads = set()
    model = _compiled()
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model)
    with hooked(tmp_path) as (engine, _):
        batch_ended = engine.session.batch_ended

        def noting(loss: Any) -> None:
            threads.add(threading.current_thread())
            batch_ended(loss)

        engine.session.batch_ended = noting  # type: ignore[method-assign]
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)

    assert threads == {threading.current_thread()}


def test_a_history_that_cannot_be_kept_is_the_scripts_all_the_same(
    tmp_path: Path,
) -> None:
    kept = object()
    hook = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(thing=kept, lr=0.5)
    )

    with hooked(tmp_path) as (_, events):
        history = _compiled().fit(X, Y, verbose=0, callbacks=[hook]).history

    assert history["thing"] == [kept]
    assert history["lr"] == [0.5]
    notes = [event.text for event in events if isinstance(event, ev.Noted)]
    assert len(notes) == 1
    assert notes[0].startswith("thing in the history is no plain data")
    assert any(isinstance(event, ev.FitEnded) for event in events)


class Interrupted(Exception):
    """What ends the first attempt."""


def test_an_epoch_resumed_behind_its_last_batch_has_its_metrics(tmp_path: Path) -> None:
    """It has no step, and so no logs, any more."""
    options: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": 0}
    options["shuffle"] = False
    plain = _compiled().fit(X, Y, **options).history

    class Interrupting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and engine.session.step == 6:
                engine.session._due = "schedule"

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise Interrupted

    with hooked(tmp_path) as (engine, _), pytest.raises(Interrupted):
        _compiled().fit(X, Y, **options, callbacks=[Interrupting()])

    with hooked(tmp_path) as (engine, events):
        ours = _compiled().fit(X, Y, **options, callbacks=[keras.callbacks.Callback()])

    restored = [event for event in events if isinstance(event, ev.Restored)]
    assert [event.step for event in restored] == [6]
    assert engine.session.step == 9
    np.testing.assert_allclose(ours.history["loss"], plain["loss"], rtol=1e-6)


@pytest.mark.parametrize("reached", [0, 7])
def test_steps_that_no_checkpoint_holds_are_told_as_lost(
    tmp_path: Path, reached: int
) -> None:
    """An attempt before came so far, and ended before its first checkpoint."""
    with hooked(tmp_path) as (engine, events):
        session = engine.session
        session.launch = replace(session.launch, last_step=reached)
        for _ in range(2):
            _compiled().fit(X, Y, batch_size=4, verbose=0)
    places = [event for event in events if isinstance(event, ev.Restored)]
    told = [(place.name, place.step, place.lost_steps) for place in places]
    assert told == ([("", 0, reached)] if reached else [])
