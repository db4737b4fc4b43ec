"""Evaluation and prediction in parts give what they give in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from oomrun.worker.engine import trial
from oomrun.worker.engine.evaluation import TestFunction
from oomrun.worker.engine.prediction import PredictFunction

ROWS = 7


pytestmark = pytest.mark.usefixtures("float64")


class Sizes:
    """At most ``most`` samples a pass; halves what did not fit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failed: list[int] = []

    def size(self, samples: int, phase: str = "evaluate") -> int:
        return min(samples, self.most)

    def ran(self, size: int, phase: str = "evaluate") -> None:
        assert size <= self.most

    def shrink(
        self, size: int, samples: int, phase: str, message: str, *, safe: bool
    ) -> bool:
        self.failed.append(size)
        self.most = size // 2
        return self.most > 0


def masked(reduction: str, **given: Any) -> Any:
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(7, 4, mask_zero=True)(x)
    h = layers.SimpleRNN(3, return_sequences=True)(h)
    outputs = [
        layers.Dense(2, name="p", kernel_regularizer="l2")(h),
        layers.Dense(1, name="q")(h),
    ]
    model = keras.Model(x, outputs)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile("sgd", [loss, "mae"], metrics=[["mae"], ["mse"]], **given)
    return model


class Own(keras.Model):  # type: ignore[misc]
    """A ``test_step`` with nothing of Keras's, and a value of the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    def test_step(self, data: Any) -> Any:
        x, y, _ = data
        loss = tf.reduce_mean(tf.square(self(x, training=False)[0] - y[0]))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "raw": loss}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


def own() -> Any:
    x = keras.Input((5,), dtype="int32")
    h = layers.Dense(3)(layers.Embedding(7, 4)(x))
    model = Own(x, [layers.Dense(2)(h), layers.Dense(1)(h)])
    model.compile("sgd")
    return model


def data() -> Any:
    rng = np.random.default_rng(0)
    x = rng.integers(1, 7, size=(ROWS, 5))
    x[np.arange(5) >= rng.integers(1, 6, size=(ROWS, 1))] = 0
    y = (rng.normal(size=(ROWS, 5, 2)), rng.normal(size=(ROWS, 5, 1)))
    weight = rng.uniform(size=(ROWS, 5))
    return tf.data.Dataset.from_tensor_slices((x, y, (weight, weight))).batch(ROWS)


MODELS: dict[str, Callable[[], Any]] = {
    name: (lambda name=name: masked(name))  # type: ignore[misc]
    for name in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")
}
MODELS |= {
    "xla": lambda: masked("mean", jit_compile=True),
    "eager": lambda: masked("mean_with_sample_weight", run_eagerly=True),
    "own": own,
}


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_in_parts_is_that_of_the_whole_batch(name: str) -> None:
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model.make_test_function()
    wanted = model.test_function(iter(data()))
    wanted = {key: float(value) for key, value in wanted.items()}
    verdicts: list[trial.Verdict] = []
    sizes = Sizes(ROWS)
    function = TestFunction(model, sizes, verdicts.append)
    for sizes.most, tried in ((ROWS, 0), (3, 1), (1, 1)):
        model.reset_metrics()
        logs = function(iter(data()))
        found = {key: float(value) for key, value in logs.items()}
        assert found == pytest.approx(wanted, rel=1e-10)
        assert len(verdicts) == tried
    assert not verdicts[0].metrics


@pytest.mark.parametrize(("most", "first"), [(ROWS, ROWS), (ROWS, 2), (3, 6)])
def test_it_is_traced_once_whichever_batch_came_first(most: int, first: int) -> None:
    """After a resume it may be another: other graphs differ in a sum's last bits."""
    keras.utils.set_random_seed(1)
    model = own()
    traced: list[Any] = []
    step = model.test_step

    def test_step(given: Any) -> Any:
        if not tf.executing_eagerly():
            traced.append(given[0].shape)
        return step(given)

    model.test_step = test_step
    function = TestFunction(model, Sizes(most), lambda verdict: None)
    function(iter(data().unbatch().batch(first)))
    assert traced
    traced.clear()
    for rows in (ROWS, 4):
        function(iter(data().unbatch().batch(rows)))
    assert not traced


class Large(layers.Layer):  # type: ignore[misc]
    """Runs out of memory above two rows."""

    def call(self, x: Any) -> Any:
        def allocate(value: Any) -> Any:
            if len(value) > 2:
                raise MemoryError("OOM when allocating tensor")
            return value

        return tf.ensure_shape(tf.numpy_function(allocate, [x], x.dtype), x.shape)


def large() -> Any:
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(1)(Large()(x)))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_what_did_not_fit_is_taken_again_in_smaller_parts() -> None:
    keras.utils.set_random_seed(1)
    model = large()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 1))
    sizes = Sizes(ROWS)
    function = TestFunction(model, sizes, lambda verdict: None)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    logs = function(iter(batches))
    dense = model.layers[-1]
    apart = x @ dense.kernel.numpy() + dense.bias.numpy() - y
    assert float(logs["loss"]) == pytest.approx(np.mean(apart**2), rel=1e-12)
    assert float(logs["mae"]) == pytest.approx(np.mean(np.abs(apart)), rel=1e-12)
    assert sizes.failed == [7, 3]
    model.make_predict_function()
    sizes = Sizes(ROWS)
    predict = PredictFunction(model, model.predict_function, sizes, refused)
    found = predict([(tf.constant(x),)])
    np.testing.assert_allclose(found, apart + y, rtol=1e-12)
    assert sizes.failed == [7, 3]


def refused() -> None:
    raise AssertionError("it can be cut")


class Centers(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(x, 0)


class Norm(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return tf.reduce_sum(tf.square(x))


@pytest.mark.parametrize("cls", [Centers, Norm])
def test_predictions_that_depend_on_the_batch_are_not_cut(cls: Any) -> None:
    x = keras.Input((3,))
    model = keras.Model(x, {"a": x, "b": cls()(x)})
    model.make_predict_function()
    told: list[int] = []
    function = PredictFunction(
        model, model.predict_function, Sizes(3), lambda: told.append(1)
    )
    data = [(tf.random.normal((ROWS, 3), dtype=tf.float64),)]
    found, wanted = function(data), model.predict_function(data)
    np.testing.assert_array_equal(found["b"], wanted["b"])
    function(data)
    assert told == [1]
