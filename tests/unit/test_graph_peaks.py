"""What the graph of a step says of its memory, and what it cannot see."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from oomrun.worker.engine import slicing, static
from oomrun.worker.engine.step import StepFunction
from oomrun.worker.step_graph import StepGraph


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


def test_rows_that_are_looked_up_are_counted_of_tables_that_are_trained() -> None:
    ids, user = keras.Input((50,), dtype="int32"), keras.Input((), dtype="int32")
    table = keras.layers.Embedding(1000, 32)
    frozen = keras.layers.Embedding(1000, 8, trainable=False)
    half = keras.layers.Embedding(1000, 16, dtype="mixed_float16")
    of_ids, of_user = table(ids), table(user)  # the same one
    rest = keras.ops.mean(half(ids), 1), keras.ops.mean(frozen(ids), 1)
    model = keras.Model([ids, user], [keras.ops.mean(of_ids, 1), of_user, *rest])
    each = 50 * 32 * 4 + 32 * 4 + 50 * 16 * 2
    assert static.looked_up_bytes(model, 10) == 10 * each


def test_most_of_a_step_may_be_what_is_looked_up() -> None:
    ids = keras.Input((50,), dtype="int32")
    found = keras.layers.Embedding(1000, 32)(ids)
    hidden = keras.layers.GlobalAveragePooling1D()(found)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    data = (tf.zeros([8, 50], tf.int32), tf.zeros([8, 1]))
    function = StepFunction(model)
    function.trace_for(slicing.specs_of(data))
    graph = StepGraph(model, function)
    graph.ask(data, 96)
    rows = 96 * 50 * 32 * 4
    assert graph.sums_bytes == 2 * rows
    assert not graph.loops  # nothing was overlooked
    assert 2 * rows <= graph.guess[96] <= graph.peaks[96].bytes


def test_sequences_of_any_length_tell_nothing_of_what_is_looked_up() -> None:
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Embedding(1000, 32)(ids))
    assert static.looked_up_bytes(model, 10) == 0
