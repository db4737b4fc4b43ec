"""What a script leaves to chance is repeatable, and what it seeds is its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

from oomrun.worker import randomness
from oomrun.worker.encoding import decode, encode


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tf.data.Dataset, "shuffle", tf.data.Dataset.shuffle)
    made = keras.random.SeedGenerator.__init__
    monkeypatch.setattr(keras.random.SeedGenerator, "__init__", made)
    _new_process()
    yield
    _new_process()


def _new_process() -> None:
    tf.random.set_seed(None)
    global_state.set_global_attribute("global_seed_generator", None)


def script() -> list[Any]:
    """Everything random that an unseeded script may do."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)]
    )
    data = tf.data.Dataset.range(20).shuffle(20).batch(20)
    return [
        random.random(),
        np.random.random(),
        [w.tolist() for w in model.get_weights()],
        model(np.ones((4, 3)), training=True).numpy().tolist(),
        keras.random.normal((2,)).numpy().tolist(),
        [next(iter(data)).numpy().tolist() for _ in range(2)],
    ]


def test_an_unseeded_script_does_the_same_again_for_the_same_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        _new_process()
        randomness.seed_unseeded(seed)
        runs.append(script())
    assert runs[0] == runs[1]
    assert all(a != b for a, b in zip(runs[0], runs[2], strict=True))
    # No order is drawn twice, as without us.
    assert runs[0][-1][0] != runs[0][-1][1]


def test_a_seeded_script_does_what_it_does_without_us() -> None:
    keras.utils.set_random_seed(4)
    alone = script()
    _new_process()
    randomness.seed_unseeded(1)
    keras.utils.set_random_seed(4)
    assert script() == alone


def test_the_scripts_own_shuffle_seed_stays() -> None:
    def order() -> list[int]:
        data = tf.data.Dataset.range(20).shuffle(20, seed=3)
        return [int(v) for v in data]

    alone = order()
    randomness.seed_unseeded(1)
    assert order() == alone


def test_save_and_restore() -> None:
    randomness.seed_unseeded(1)
    keras.random.normal((2,))
    packed: dict[str, Any] = {}
    kept = encode(randomness.save(), packed, "random")

    def draw() -> list[Any]:
        return [
            random.random(), random.gauss(0, 1), np.random.random(),
            np.random.standard_normal(), keras.random.normal((2,)).numpy().tolist(),
        ]  # fmt: skip

    wanted = draw()
    draw()
    _new_process()
    randomness.restore(decode(kept, packed))
    assert draw() == wanted


def test_restoring_before_keras_was_used() -> None:
    randomness.seed_unseeded(1)
    state = randomness.save()
    assert "keras" not in state
    randomness.restore(state)
    one = random.random()
    randomness.restore(state)
    assert random.random() == one


class Noisy(keras.losses.Loss):
    """Draws by a generator that it holds itself, as no layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        shape = keras.ops.shape(y_pred)
        return keras.random.normal(shape, seed=self.seeds) + y_pred - y_true


class Trained:
    """What a script builds each time that it begins: generators of every kind."""

    def __init__(self) -> None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(4)
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        self.model.compile("sgd", Noisy())
        self.loose = keras.random.SeedGenerator()
        self.alike = [keras.random.SeedGenerator(7, name="alike") for _ in range(2)]

    def draw(self) -> list[Any]:
        """A number of each generator that is not the model's."""
        alike = [keras.random.normal((), seed=seeds) for seeds in self.alike]
        loose = keras.random.normal((), seed=self.loose)
        loss = self.model.loss(np.zeros((2, 1)), np.zeros((2, 1)))
        return [float(value) for value in [*alike, loose, loss]]


def test_generators_that_no_model_holds_are_saved() -> None:
    randomness.seed_unseeded(1)
    first = Trained()
    first.draw()
    first.alike[1].next()
    packed: dict[str, Any] = {}
    kept = encode(randomness.save(first.model), packed, "random")
    wanted = [first.draw() for _ in range(2)]

    del first
    _new_process()
    randomness.seed_unseeded(1)
    second = Trained()
    dropout = second.model.layers[0].seed_generator
    dropout.next()
    before = dropout.state.numpy().tolist()
    randomness.restore(decode(kept, packed))
    assert [second.draw() for _ in range(2)] == wanted
    # The model's own is restored with the model, which may have been trained since.
    assert dropout.state.numpy().tolist() == before


def test_generators_that_cannot_be_told_apart_are_left_alone() -> None:
    randomness.seed_unseeded(1)
    first = Trained()
    first.draw()
    state = randomness.save(first.model)

    randomness.seed_unseeded(1)
    second = Trained()
    third = keras.random.SeedGenerator(7, name="alike")
    randomness.restore(state)
    seeds = [*second.alike, third]
    assert [g.state.numpy().tolist() for g in seeds] == [[7, 0]] * 3
    assert second.loose.state.numpy().tolist()[1] == 1


def test_without_a_model_the_generators_of_layers_stay_as_they_are() -> None:
    """They are the model's, whose variables are not put back then."""
    randomness.seed_unseeded(1)
    trained = Trained()
    state = randomness.save()
    trained.draw()
    wanted = trained.loose.state.numpy().tolist()
    randomness.restore(state)
    assert trained.loose.state.numpy().tolist() == wanted
