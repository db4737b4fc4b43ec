"""Only few distinct shapes reach TensorFlow: what a whole ``fit`` traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from engine.harness import Engine
from engine.running import seeded

EPOCHS = 4


class Traced(layers.Layer):  # type: ignore[misc]
    """Counts in Python: once a trace, whatever runs."""

    count = 0

    def call(self, x: Any) -> Any:
        Traced.count += 1
        return x


def variable_length() -> Any:
    """Batches of 8, 8, 8, 3 sequences, each batch as long as its longest."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 20, size=27)

    def sequences() -> Iterator[Any]:
        for length in lengths:
            yield rng.normal(size=(length, 3)), float(length)

    data = tf.data.Dataset.from_generator(
        sequences,
        output_signature=(
            tf.TensorSpec((None, 3), "float32"),
            tf.TensorSpec((), "float32"),
        ),
    )
    return data.padded_batch(8)


def partial_batches() -> Any:
    """Batches of 8, 8, 8, 3 sequences of one length."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(27, 5, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, 0, 0])).batch(8)


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Another micro-batch each epoch; the traces that there were after each."""

    def __init__(self, bound: Callable[[int], None], sizes: list[int]) -> None:
        super().__init__()
        self.bound, self.sizes, self.traces = bound, sizes, [0]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.bound(self.sizes[epoch])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.traces.append(Traced.count)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [5, 3, 2, 1]], ids=["same", "falling"])
@pytest.mark.parametrize("data", [variable_length, partial_batches])
def test_nothing_is_traced_in_steady_state(
    data: Callable[[], Any], sizes: list[int], tmp_path: Path
) -> None:
    with seeded("float32"):
        model = keras.Sequential(
            [
                keras.Input((None, 3)),
                Traced(),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        engine = Engine(tmp_path)
        Traced.count = 0
        watching = Watching(lambda size: engine.bound(size, size), sizes)
        with engine.on(sizes[0], sizes[0]):
            model.fit(
                data(),
                validation_data=data(),
                epochs=EPOCHS,
                verbose=0,
                callbacks=[watching],
            )
        engine.close()
    assert {ran.size for ran in engine.ran} >= set(sizes)
    first, *later = np.diff(watching.traces)
    assert later == [0] * (EPOCHS - 1)
    # The trial, the step whole and in parts, its scout; evaluation: not one a shape.
    assert first <= 40
