"""Entering the data in mid-epoch gives what an uninterrupted epoch would have given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker import randomness
from oomrun.worker.position import DataEndedError, EpochIterator, Position, fingerprint

X = np.arange(22)
EPOCHS = 3
STRATEGY = tf.distribute.get_strategy()


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``seed_unseeded`` replaces ``Dataset.shuffle``, for this test only."""
    monkeypatch.setattr(tf.data.Dataset, "shuffle", tf.data.Dataset.shuffle)
    made = keras.random.SeedGenerator.__init__
    monkeypatch.setattr(keras.random.SeedGenerator, "__init__", made)
    yield
    tf.random.set_seed(None)


class Shuffled(keras.utils.PyDataset):
    """Draws a new order from NumPy's generator after every epoch."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.order = np.arange(22)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return X[self.order[index * 4 : index * 4 + 4]]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class Constant(Shuffled):
    """Has the same batches in every epoch."""

    def on_epoch_end(self) -> None:
        pass


def generated() -> Iterator[Any]:
    """Python's own generator, of a length that nobody knows."""
    for start in range(0, 22, 4):
        yield X[start : start + 4]


def unknown() -> tf.data.Dataset:
    spec = tf.TensorSpec((None,), tf.int64)
    return tf.data.Dataset.from_generator(generated, output_signature=spec)


def shuffled(**given: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(X).shuffle(22, **given)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "batch_size": 4, "shuffle": True},
    "arrays in order": lambda: {"x": X, "batch_size": 4},
    "arrays, shuffled by batches": lambda: {
        "x": X, "batch_size": 4, "shuffle": "batch",
    },
    "arrays, fixed steps": lambda: {
        "x": X, "batch_size": 4, "shuffle": True, "steps_per_epoch": 4,
    },
    "dataset": lambda: {"x": shuffled().batch(4)},
    "dataset, one order": lambda: {
        "x": shuffled(reshuffle_each_iteration=False).batch(4)
    },
    "dataset, own seed": lambda: {"x": shuffled(seed=3).batch(4)},
    "dataset, two shuffles": lambda: {"x": shuffled().batch(4).shuffle(3).prefetch(2)},
    "dataset, repeated in an epoch": lambda: {"x": shuffled().repeat(2).batch(8)},
    "dataset, cached": lambda: {"x": shuffled().cache().batch(4)},
    "dataset, files": lambda: {
        "x": shuffled().interleave(lambda v: tf.data.Dataset.from_tensors(v))
        .shuffle(5).batch(4)
    },
    "dataset, repeated": lambda: {
        "x": shuffled().batch(4).repeat(), "steps_per_epoch": 4,
    },
    "dataset, steps over its end": lambda: {
        "x": shuffled().repeat(2).batch(4), "steps_per_epoch": 3,
    },
    "dataset, filtered": lambda: {
        "x": shuffled().filter(lambda v: v % 3 != 0).batch(4)
    },
    "dataset, unknown length": lambda: {"x": unknown()},
    "PyDataset": lambda: {"x": Shuffled()},
    # Keras draws the order of the batches, besides.
    "PyDataset, shuffled": lambda: {"x": Shuffled(), "shuffle": True},
    "PyDataset, shuffled, fixed steps": lambda: {
        "x": Constant(), "shuffle": True, "steps_per_epoch": 4,
    },
    "PyDataset, read by threads": lambda: {"x": Shuffled(workers=2)},
    "generator": lambda: {
        "x": ((batch,) for _ in range(3) for batch in generated()),
        "steps_per_epoch": 5,
    },
}  # fmt: skip


def restarted(source: str, script_seed: int | None, **given: Any) -> EpochIterator:
    """What the process builds each time that it begins."""
    tf.random.set_seed(None)
    randomness.seed_unseeded(seed=99)
    if script_seed is not None:
        keras.utils.set_random_seed(script_seed)
    return EpochIterator(
        distribute_strategy=STRATEGY,
        epoch_seed=randomness.EpochSeed(99, fit=1),
        **{"shuffle": False, **SOURCES[source](), **given},
    )


def trained(epochs: EpochIterator) -> list[list[int]]:
    """The batches of one epoch, as ``fit`` of any Keras version asks for them."""
    found = []
    with epochs.catch_stop_iteration():
        for *_, iterator in epochs.enumerate_epoch():
            found.append(np.asarray(next(iterator)).ravel().tolist())
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def positions(source: str) -> list[tuple[int, int]]:
    """Some positions: both ends of epochs, and between."""
    count = 3 if "over its end" in source else 4
    return [(0, 1), (0, count), (1, 0), (1, 2), (2, 1), (2, count - 1)]


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("script_seed", [None, 5], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("source", SOURCES)
def test_an_entrance_gives_the_rest(source: str, script_seed: int | None) -> None:
    whole = restarted(source, script_seed)
    uninterrupted = [trained(whole) for _ in range(EPOCHS)]
    for epoch, batches in positions(source):
        epochs = restarted(source, script_seed)
        last = ""
        if batches:
            taken = tf.constant(uninterrupted[epoch][batches - 1], tf.int64)
            last = fingerprint((taken,))
        epochs.enter_at(Position(epochs=epoch, batches=batches, fingerprint=last))
        rest = [trained(epochs) for _ in range(epoch, EPOCHS)]
        wanted = [uninterrupted[epoch][batches:], *uninterrupted[epoch + 1 :]]
        assert rest == wanted, (epoch, batches)
        assert epochs.repeats is (True if batches else None)


@pytest.mark.parametrize("source", ["arrays", "dataset", "dataset, two shuffles"])
def test_an_unseeded_script_still_sees_new_orders(source: str) -> None:
    epochs = restarted(source, None)
    orders = [flat(trained(epochs)) for _ in range(EPOCHS)]
    assert all(sorted(order) == list(range(22)) for order in orders)
    assert len({tuple(order) for order in orders}) == EPOCHS
    # Another run draws others.
    tf.random.set_seed(None)
    other = EpochIterator(
        distribute_strategy=STRATEGY, epoch_seed=randomness.EpochSeed(7, fit=1),
        x=X, batch_size=4, shuffle=True,
    )  # fmt: skip
    assert flat(trained(other)) not in orders


def test_a_dataset_that_two_fits_share_goes_on() -> None:
    keras.utils.set_random_seed(5)
    data = shuffled().batch(4)
    given = {"distribute_strategy": STRATEGY, "shuffle": False}
    fits = [
        EpochIterator(x=data, epoch_seed=randomness.EpochSeed(99, fit=n), **given)
        for n in (1, 2)
    ]
    epochs = [trained(fits[0]), trained(fits[0]), trained(fits[1])]
    keras.utils.set_random_seed(5)
    data = shuffled().batch(4)
    fits = [
        EpochIterator(x=data, epoch_seed=randomness.EpochSeed(99, fit=n), **given)
        for n in (1, 2)
    ]
    fits[0].pass_epochs(2)
    assert trained(fits[1]) == epochs[2]


def test_an_order_is_that_of_before_the_generators_were_put_back() -> None:
    """A checkpoint may be of where it was drawn, and the first batch not trained."""
    source = "PyDataset, shuffled"
    whole = restarted(source, 5)
    uninterrupted = [trained(whole) for _ in range(2)]
    epochs = restarted(source, 5)
    epochs.enter_at(Position(epochs=1, batches=0))
    found, put_back = [], None
    with epochs.catch_stop_iteration():
        for *_, iterator in epochs.enumerate_epoch():
            if put_back is None:
                random.seed(77)
                put_back = random.getstate()
            assert epochs.gives(iterator)
            found.append(np.asarray(next(iterator)).ravel().tolist())
    assert found == uninterrupted[1]
    assert random.getstate() == put_back


def test_a_position_is_reached_before_the_end_of_its_epoch_draws() -> None:
    """What is put back then is what the next epoch's order was drawn from."""
    epochs, seen = restarted("PyDataset", 5), []
    data = epochs.data_adapter.py_dataset
    epochs.arrived = lambda: seen.append(data.order.tolist())
    epochs.enter_at(Position(epochs=0, batches=6))
    assert trained(epochs) == []
    assert seen == [list(range(22))]
    assert data.order.tolist() != seen[0]


def test_several_steps_an_execution() -> None:
    def executions(epochs: EpochIterator) -> list[list[int]]:
        found = []
        with epochs.catch_stop_iteration():
            for *_, iterator in epochs.enumerate_epoch():
                for _ in epochs.steps_due():
                    found.append(np.asarray(next(iterator)).tolist())
        return found

    given = {"steps_per_execution": 2}
    whole = restarted("arrays", 5, **given)
    uninterrupted = [executions(whole) for _ in range(2)]
    # Odd ones: memory ran out within an execution, and a checkpoint was written there.
    for batches in (1, 2, 3, 4, 5, 6):
        epochs = restarted("arrays", 5, **given)
        epochs.enter_at(Position(epochs=1, batches=batches))
        assert executions(epochs) == uninterrupted[1][batches:]


def test_data_that_differs_is_noticed() -> None:
    epochs = restarted("arrays in order", 5)
    epochs.enter_at(Position(epochs=0, batches=2, fingerprint="of another batch"))
    trained(epochs)
    assert epochs.repeats is False


def test_data_that_ends_too_soon_is_an_error() -> None:
    epochs = restarted("dataset, unknown length", 5)
    epochs.enter_at(Position(epochs=0, batches=7))
    with pytest.raises(DataEndedError, match="has changed"):
        trained(epochs)


def test_fingerprints() -> None:
    one = (tf.constant([1.0, 2.0]), {"a": tf.constant(["text"])})
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint((tf.constant([1.0, 3.0]), one[1]))
    assert fingerprint(tf.zeros((2, 3))) != fingerprint(tf.zeros((3, 2)))
    assert fingerprint(tf.zeros((0,)))
