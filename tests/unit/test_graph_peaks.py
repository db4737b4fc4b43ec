"""What the graph of a step says of its memory, and what it cannot see."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from oomrun.worker.engine import slicing, static
from oomrun.worker.engine.step import StepFunction


def model_of(*layers: keras.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((24,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("repeated", [True, False])
def test_the_largest_output_is_the_least_that_is_needed(repeated: bool) -> None:
    """Behind ``tf.repeat`` the analysis knows no shapes, and counts nothing."""
    hidden = (
        [keras.layers.RepeatVector(512), keras.layers.GlobalAveragePooling1D()]
        if repeated
        else []
    )
    model = model_of(keras.layers.Dense(16), *hidden)
    data = (tf.zeros([8, 24]), tf.zeros([8, 1]))
    function = StepFunction(model)
    function.trace_for(slicing.specs_of(data))
    (peak,) = static.peaks(function.graph_function(), data, [96]).values()
    least = static.least_bytes(model, 96)
    assert least == 2 * 96 * 4 * (512 * 16 if repeated else 16)
    assert (least > peak.bytes) == repeated


def test_what_was_never_called_on_symbols_says_nothing() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(4)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.inner(x)

    model = Own()
    model(tf.zeros([2, 3]))
    assert static.least_bytes(model, 96) == 0
