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
