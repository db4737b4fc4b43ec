"""A custom loop that dies and is run again from the top: as if it had not.

In process, with real checkpoints: a script is a function, and dies by an exception. So
what is compared is all that it sees: weights, losses, batches, random numbers, values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import loops
import oomrun
from oomrun.core import events as ev
from oomrun.worker.store import ScriptChangedError

ROWS, BATCH, EPOCHS = 11, 4, 3  # three batches an epoch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The seed of a data set is half of it; the other half is the process's own."""
    keras.utils.set_random_seed(4)


class Died(Exception):
    """The process was killed."""


class Net(keras.Model):
    """Without variables until it is called; random in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = layers.Dropout(0.3), layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(x, training=training))


class Script:
    """What a script makes when it is run, and what it sees."""

    def __init__(self, dies: tuple[int, int] | None = None) -> None:
        keras.utils.set_random_seed(4)
        self.dies = dies
        self.model, self.mean = Net(), keras.metrics.Mean()
        self.noise = tf.random.Generator.from_seed(5)
        self.optimizer = keras.optimizers.Adam(0.1)
        self.loop = oomrun.Loop(
            self.loss,
            self.optimizer,
            state={"model": self.model, "others": [self.mean, self.noise]},
        )
        self.seen: dict[tuple[int, int], Any] = {}
        self.results: list[Any] = []

    def loss(self, batch: Any) -> Any:
        x, y = batch
        errors = tf.square(self.model(x, training=True)[:, 0] - y)
        self.mean.update_state(errors)
        return errors

    def train_epoch(
        self, epoch: int, source: Any, steps: int | None = None, first: int = 0
    ) -> None:
        """One pass; the keys of what is seen tell the epoch and the row."""
        for batch in self.loop.batches(source, steps):
            rows = tuple(int(row) for row in np.asarray(batch[0])[:, 0])
            at = sum(1 for key in self.seen if key[0] == epoch) + first
            if (epoch, at) == self.dies:
                raise Died
            x = batch[0] + self.noise.normal(tf.shape(batch[0])) / 100
            loss = self.loop.step((x, batch[1]))
            self.seen[epoch, at] = (rows, float(loss), float(np.random.random()))
            self.loop.values["losses"] = [*self.loop.values["losses"], float(loss)]

    def run(self, source: Any, steps: int | None = None) -> None:
        self.loop.values["losses"] = []
        for epoch in self.loop.epochs(EPOCHS):
            self.mean.reset_state()  # a restart must not lose what was counted
            np.random.random(epoch)
            done = len(self.loop.values["losses"]) % 3
            self.train_epoch(epoch, source, steps, first=done)
            self.results.append((epoch, float(self.mean.result())))

    def state(self) -> list[bytes]:
        objects = [self.model, self.mean, self.optimizer, self.noise]
        found = [v for thing in objects for v in loops.variables(thing)]
        return [tf.convert_to_tensor(v).numpy().tobytes() for v in found]


def rows() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    x[:, 0] = np.arange(ROWS)
    return x, x.sum(1) / 10


def shuffled(**options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(rows()).shuffle(ROWS, seed=2, **options)


class Permuted:
    """A source of the script's own: another order each time, by NumPy's generator."""

    def __iter__(self) -> Iterator[Any]:
        x, y = rows()
        order = np.random.permutation(ROWS)
        for start in range(0, ROWS, BATCH):
            chosen = order[start : start + BATCH]
            yield x[chosen], y[chosen]


SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: shuffled().batch(BATCH),
    "shuffled twice": lambda: shuffled().shuffle(5, seed=3).batch(BATCH).prefetch(2),
    "a list": lambda: list(shuffled().batch(BATCH)),
    "an order of the script's own": Permuted,
    "one iterator over all epochs": lambda: iter(shuffled().batch(BATCH).repeat()),
}


def same(one: Script, other: Script) -> bool:
    values = dict(one.loop.values) == dict(other.loop.values)
    return values and one.state() == other.state()


@pytest.mark.parametrize(
    ("name", "dies"),
    [*((name, (2, 1)) for name in SOURCES), ("shuffled", (0, 2)), ("shuffled", (1, 1))],
)
def test_a_loop_goes_on_where_it_was(
    name: str, dies: tuple[int, int], tmp_path: Path
) -> None:
    # One iterator for all epochs does not end by itself.
    steps = 3 if name.startswith("one iterator") else None
    with loops.worker(tmp_path / "whole"):
        whole = Script()
        whole.run(SOURCES[name](), steps)
    with (
        pytest.raises(Died),
        loops.worker(tmp_path / "run", checkpoint_every_steps=2) as before,
    ):
        Script(dies).run(SOURCES[name](), steps)
    with loops.worker(tmp_path / "run", attempt=2) as events:
        again = Script()
        again.run(SOURCES[name](), steps)
    step = dies[0] * 3 + dies[1]
    (restored,) = [e for e in events if isinstance(e, ev.Restored)]
    assert restored.step == step - step % 2
    assert not [e for e in (*before, *events) if isinstance(e, ev.Noted)]
    assert same(again, whole)
    # Batches, losses and random numbers of what was left to do.
    left = {k: v for k, v in whole.seen.items() if k[0] * 3 + k[1] >= restored.step}
    assert again.seen == left
    assert again.results == whole.results[(restored.step - 1) // 3 :]


def phases(script: Script, first: Any, cut: Any) -> None:
    """Two loops over batches in an epoch, the first of which is broken out of."""
    script.loop.values["losses"] = []
    for epoch in script.loop.epochs(EPOCHS):
        for batch in script.loop.batches(first):
            script.loop.step(batch)
            if epoch == 1:
                break
        script.train_epoch(epoch, cut.take(2))
        script.results.append(float(script.mean.result()))


@pytest.mark.parametrize("every", [1, 4, 6])
def test_several_passes_in_an_epoch(every: int, tmp_path: Path) -> None:
    # Steps an epoch: 3 + 2, then 1 + 2, then 3 + 2.
    sources = shuffled().batch(BATCH), shuffled().shuffle(ROWS, seed=8).batch(BATCH)
    with loops.worker(tmp_path / "whole"):
        whole = Script()
        phases(whole, *sources)
    sources = shuffled().batch(BATCH), shuffled().shuffle(ROWS, seed=8).batch(BATCH)
    with (
        pytest.raises(Died),
        loops.worker(tmp_path / "run", checkpoint_every_steps=every),
    ):
        phases(Script(dies=(2, 1)), *sources)
    sources = shuffled().batch(BATCH), shuffled().shuffle(ROWS, seed=8).batch(BATCH)
    with loops.worker(tmp_path / "run", attempt=2) as events:
        again = Script()
        phases(again, *sources)
    (restored,) = [e for e in events if isinstance(e, ev.Restored)]
    assert restored.step == 12 - 12 % every
    assert not [e for e in events if isinstance(e, ev.Noted)]
    assert same(again, whole)


def two_loops(script: Script, *, leave: bool) -> tuple[list[int], list[int]]:
    """A loop that ends, or is left; what comes after it; another training."""
    source = shuffled().batch(BATCH)
    first, second = [], []
    for epoch in script.loop.epochs(2):
        first.append(epoch)
        for batch in script.loop.batches(source):
            script.loop.step(batch)
        if leave and epoch == 0:
            script.loop.values["left"] = epoch
            break
    script.results.append(float(script.mean.result()))
    script.mean.reset_state()
    script.loop.values["losses"] = []
    for epoch in script.loop.epochs(1):
        second.append(epoch)
        script.train_epoch(epoch, tf.data.Dataset.from_tensor_slices(rows()).batch(4))
    return first, second


@pytest.mark.parametrize("leave", [False, True])
def test_a_completed_loop_is_not_trained_again(leave: bool, tmp_path: Path) -> None:
    with loops.worker(tmp_path / "whole") as events:
        whole = Script()
        wanted = two_loops(whole, leave=leave)
    assert wanted == ([0] if leave else [0, 1], [0])
    ended = [e for e in events if isinstance(e, ev.FitEnded)]
    assert [(e.fit, e.step, e.epoch) for e in ended] == (
        [(1, 3, 1), (2, 6, 1)] if leave else [(1, 6, 2), (2, 9, 1)]
    )
    with (
        pytest.raises(Died),
        loops.worker(tmp_path / "run", checkpoint_every_steps=1),
    ):
        two_loops(Script(dies=(0, 1)), leave=leave)
    with loops.worker(tmp_path / "run", attempt=2) as events:
        again = Script()
        assert two_loops(again, leave=leave) == ([], [0])
    ended = [e for e in events if isinstance(e, ev.FitEnded)]
    assert [(e.fit, e.replayed) for e in ended] == [(1, True), (2, False)]
    assert again.results == whole.results
    assert again.loop.values.get("left") == (0 if leave else None)
    assert same(again, whole)


def test_a_loop_left_by_an_error_is_trained_again(tmp_path: Path) -> None:
    with (
        pytest.raises(Died),
        loops.worker(tmp_path, checkpoint_every_steps=2) as events,
    ):
        Script(dies=(1, 1)).run(shuffled().batch(BATCH))
    assert not [e for e in events if isinstance(e, ev.FitEnded)]
    with loops.worker(tmp_path, attempt=2) as events:
        Script().run(shuffled().batch(BATCH))
    (restored,) = [e for e in events if isinstance(e, ev.Restored)]
    assert restored.step == 4
    with loops.worker(tmp_path, attempt=3):
        script = Script()
        with pytest.raises(ScriptChangedError, match="epochs is 2, but was 3"):
            next(script.loop.epochs(2))


def test_data_that_does_not_repeat_is_said(tmp_path: Path) -> None:
    numbers = np.random.default_rng()

    def batches() -> Iterator[Any]:
        for _ in range(3):
            x = numbers.normal(size=(4, 3)).astype("float32")
            yield x, x.sum(1)

    def run(script: Script) -> None:
        script.loop.values["losses"] = []
        for epoch in script.loop.epochs(1):
            script.train_epoch(epoch, batches())

    with (
        pytest.raises(Died),
        loops.worker(tmp_path, checkpoint_every_steps=1),
    ):
        run(Script(dies=(0, 2)))
    with loops.worker(tmp_path, attempt=2) as events:
        run(Script())
    (note,) = [e for e in events if isinstance(e, ev.Noted)]
    assert note.code == "data-not-repeated"


def first_batches(script: Script, *, dies: bool) -> None:
    """Each epoch ends with its first batch, so that nothing is saved after a body."""
    source = shuffled().batch(BATCH)
    for epoch in script.loop.epochs(EPOCHS):
        drawn = float(np.random.random())
        if dies and epoch == 2:
            raise Died
        for batch in script.loop.batches(source):
            loss = float(script.loop.step(batch))
            break
        script.seen[epoch, 0] = (drawn, loss, batch[0].numpy().tolist())


def test_it_is_saved_between_two_epochs(tmp_path: Path) -> None:
    with loops.worker(tmp_path / "whole"):
        whole = Script()
        first_batches(whole, dies=False)
    with (
        pytest.raises(Died),
        loops.worker(tmp_path / "run", checkpoint_every_steps=1),
    ):
        first_batches(Script(), dies=True)
    with loops.worker(tmp_path / "run", attempt=2) as events:
        again = Script()
        first_batches(again, dies=False)
    (restored,) = [e for e in events if isinstance(e, ev.Restored)]
    assert restored.step == 2
    assert again.seen == {(2, 0): whole.seen[2, 0]}
    assert same(again, whole)
