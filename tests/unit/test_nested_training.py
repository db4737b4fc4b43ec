"""What a callback trains while its fit runs is no part of where that fit stands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.harness import Engine
from oomrun.core import events as ev
from oomrun.worker.engine.step import StepFunction

X = np.random.RandomState(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
FIT: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": 0}
STEPS = 9


@contextlib.contextmanager
def hooked(folder: Path, **launch: Any) -> Iterator[tuple[Engine, list[ev.Event]]]:
    """Keras in this process with our hooks; the events are there at the end."""
    engine, events = Engine(folder), list[ev.Event]()
    session = engine.session
    session.launch = replace(session.launch, checkpoint_every_steps=2, **launch)
    try:
        with engine.on(None):
            yield engine, events
    finally:
        events += engine.close()


def compiled(**given: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.3)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", **given)
    return model


def on_batch(model: Any) -> None:
    model.train_on_batch(X[:5], Y[:5])


def in_order(model: Any) -> None:
    model.fit(X[:10], Y[:10], batch_size=4, verbose=0, shuffle=False)


def shuffled(model: Any) -> None:
    model.fit(X[:10], Y[:10], batch_size=4, epochs=2, verbose=0)


def of_a_dataset(model: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices((X[:10], Y[:10])).batch(4)
    model.fit(data, verbose=0, shuffle=False, validation_data=(X, Y))


class Within(keras.callbacks.Callback):
    """Trains the model further in every hook."""

    def __init__(self, train: Callable[[Any], None]) -> None:
        super().__init__()
        self._train, self._inside = train, False

    def _once(self) -> None:
        self._train(self.model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._once()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._once()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._once()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._once()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._once()


class Interrupted(Exception):
    """What ends the first attempt."""


class Ending(keras.callbacks.Callback):
    """Ends the first attempt before a step of the outer fit."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self._left = before

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            raise Interrupted


@pytest.mark.parametrize(
    ("train", "executions"),
    [
        (on_batch, 1),
        (on_batch, 2),
        (in_order, 2),
        pytest.param(shuffled, 1, marks=pytest.mark.slow),
        pytest.param(of_a_dataset, 1, marks=pytest.mark.slow),
    ],
)
def test_a_fit_goes_on_from_where_it_stood(
    tmp_path: Path, train: Callable[[Any], None], executions: int
) -> None:
    def fit(*callbacks: Any) -> Any:
        model = compiled(steps_per_execution=executions)
        model.fit(X, Y, **FIT, callbacks=[Within(train), *callbacks])
        return model

    plain = fit()
    # Of 9 steps; an execution of two has the third of an epoch to itself.
    last = 6 if executions == 1 else 4
    with hooked(tmp_path) as (engine, _), pytest.raises(Interrupted):
        fit(Ending(before=last))

    with hooked(tmp_path) as (engine, events):
        ours = fit()

    restored = [event.step for event in events if isinstance(event, ev.Restored)]
    assert len(restored) == 1
    assert 3 < restored[0] < 6
    assert engine.session.step == STEPS
    assert not [event for event in events if isinstance(event, ev.Noted)]
    for found, wanted in zip(ours.variables, plain.variables, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5)
    for mine, theirs in zip(
        ours.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("attempt", [1, 2])
def test_orders_that_a_restart_begins_anew_are_told(
    tmp_path: Path, attempt: int
) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(12).batch(4)

    def train(model: Any) -> None:
        model.fit(data, verbose=0, shuffle=False)

    with hooked(tmp_path, attempt=attempt) as (_, events):
        compiled().fit(X, Y, **FIT, callbacks=[Within(train)])

    notes = [event.code for event in events if isinstance(event, ev.Noted)]
    assert notes == (["data-not-repeated"] if attempt > 1 else [])


@pytest.mark.parametrize("within", [True, False], ids=["callback", "fit"])
def test_what_a_callback_is_at_is_not_saved_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """One that runs out of memory ends the attempt: what it was at is done again."""
    run = StepFunction.run

    def exhausted(function: Any, data: Any, samples: int, size: int) -> Any:
        if samples == 1:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return run(function, data, samples, size)

    def leave() -> None:
        raise Interrupted

    saved = []
    monkeypatch.setattr(StepFunction, "run", exhausted)
    callback = Within(lambda model: model.train_on_batch(X[:1], Y[:1]))
    with hooked(tmp_path) as (engine, _):
        session = engine.session
        monkeypatch.setattr(session, "leave_for_restart", leave)
        monkeypatch.setattr(session, "emergency_checkpoint", lambda: saved.append(1))
        callbacks, size = ([callback], 4) if within else ([], 1)
        with pytest.raises(Interrupted):
            compiled().fit(X, Y, batch_size=size, verbose=0, callbacks=callbacks)
    assert saved == ([] if within else [1])
