"""Steps of the user's own: cut where that is exact, and never where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from oomrun.worker import building, caveats, checkpointing
from oomrun.worker.engine import slicing
from oomrun.worker.engine.applying import optimizers_of
from oomrun.worker.engine.returning import flat
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.step import StepFunction

BATCH = 6


pytestmark = pytest.mark.usefixtures("float64")


def batch(seed: int = 0, size: int = BATCH) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 4)), rng.normal(size=(size, 2))


class AsInTheGuide(keras.Model):  # type: ignore[misc]
    """The form of Keras's guide on customising ``fit``."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class LowLevel(keras.Model):  # type: ignore[misc]
    """Nothing of Keras's losses and trackers, and a value of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(
            (g, w) for g, w in zip(gradients, weights, strict=True) if g is not None
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "raw": loss}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


class OnTop(keras.Model):  # type: ignore[misc]
    """Keras's own step, and something added."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        logs["rate"] = self.optimizer.learning_rate
        return logs


class Gan(keras.Model):  # type: ignore[misc]
    """Two networks, two optimizers; no ``call``."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.noisy = noisy
        self.seeds = keras.random.SeedGenerator(3)
        self.critic = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [keras.Input((2,)), layers.Dense(5, "tanh"), layers.Dense(4)]
        )
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic: Any, generator: Any, loss: Any) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic, generator
        self.loss_fn = loss

    @property
    def metrics(self) -> list[Any]:
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data: Any) -> Any:
        real, latent = data
        size = tf.shape(real)[0]
        if self.noisy:
            latent += keras.random.normal((size, 2), seed=self.seeds)
        made = self.generator(latent, training=True)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([real, made], 0), training=True)
            first = self.loss_fn(labels, judged)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(
            zip(tape.gradient(first, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.critic(self.generator(latent, training=True))
            second = self.loss_fn(tf.ones((size, 1)), judged)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(
            zip(tape.gradient(second, weights), weights, strict=True)
        )
        self.critic_loss.update_state(first)
        self.generator_loss.update_state(second)
        return {m.name: m.result() for m in self.metrics}


def network(cls: type, *extra: Any) -> Any:
    x = keras.Input((4,))
    h = layers.Dense(5, "tanh", kernel_regularizer="l2")(x)
    for layer in extra:
        h = layer(h)
    model = cls(x, layers.Dense(2)(h))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def gan(**settings: Any) -> Any:
    model = Gan(**settings)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


class Clips(LowLevel):
    """Gradients that are clipped on their way to the optimizer."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients, _ = tf.clip_by_global_norm(gradients, 1e6)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Contrasts(LowLevel):
    """A loss that compares the samples of a batch."""

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            z = self(x)
            loss = tf.reduce_mean(tf.nn.log_softmax(z @ tf.transpose(z)))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Follows(LowLevel):
    """Writes a copy of its weights after the optimizer: once a step."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.slow = self.add_weight(shape=(2,), trainable=False, name="slow")

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.slow.assign(0.9 * self.slow + 0.1 * self.trainable_weights[-1])
        return logs


class ByHand(LowLevel):
    """Goes without an optimizer."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        weights = self.trainable_weights
        for g, w in zip(tape.gradient(loss, weights), weights, strict=True):
            w.assign_sub(0.1 * g)
        return {"loss": loss}


def state(model: Any) -> list[np.ndarray[Any, Any]]:
    return [v.value.numpy().copy() for v in checkpointing.training_variables(model)]


def trained(make: Callable[[], Any], micro: int | None) -> tuple[Any, dict[str, float]]:
    """Three steps, by Keras alone (None) or by the engine."""
    keras.utils.set_random_seed(5)
    model = make()
    batches = [slicing.as_tensors(batch(seed, BATCH - seed)) for seed in range(3)]
    building.from_batch(model, batches[0])
    function = StepFunction(model)
    for data in batches:
        if micro is None:
            logs = model.train_step(data)
        else:
            assert function.cut(data).possible, function.cut(data).reason
            logs = function.run(data, slicing.batch_size(data), micro)
    return model, {name: float(value) for name, value in flat(logs).items()}


CUT = {
    "as in the guide": lambda: network(AsInTheGuide),
    "low level": lambda: network(LowLevel),
    "on top of Keras's": lambda: network(OnTop),
    "two optimizers": gan,
}


@pytest.mark.parametrize("name", CUT)
def test_a_cut_step_is_the_step_of_the_whole_batch(name: str) -> None:
    wanted, wanted_logs = trained(CUT[name], None)
    for micro in (BATCH, 4, 1):
        found, logs = trained(CUT[name], micro)
        assert logs == pytest.approx(wanted_logs, rel=1e-10, abs=1e-12), micro
        for variable, a, b in zip(
            checkpointing.training_variables(wanted), state(found), state(wanted),
            strict=True,
        ):  # fmt: skip
            scale = max(float(np.linalg.norm(b)), 1e-3)
            error = float(np.abs(a - b).max(initial=0.0))
            assert error <= 1e-10 * scale, (micro, variable.path)


REFUSED = {
    "clips": (lambda: network(Clips), "changes gradients before"),
    "contrasts": (lambda: network(Contrasts), "compares samples of a batch"),
    "follows": (lambda: network(Follows), "slow in a way that depends on"),
    "by hand": (lambda: network(ByHand), "writes weights without an optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_cut_is_not(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    before = state(model)
    found = StepFunction(model).cut(data)
    assert not found.possible
    assert reason in found.reason
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gan(noisy=True),
        lambda: network(AsInTheGuide, layers.Dropout(0.5)),
        lambda: network(LowLevel, layers.GaussianNoise(0.3)),
        lambda: network(OnTop, layers.BatchNormalization()),
    ],
)
def test_random_numbers_and_statistics_are_tied_to_rows_in_a_trial(make: Any) -> None:
    model = make()
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    found = StepFunction(model).cut(data)
    assert (found.separability, found.metrics) == (Separability.MEAN, ()), found.reason


def test_the_optimizers_beside_the_compiled_one_are_kept_too() -> None:
    model = gan()
    building.from_batch(model, slicing.as_tensors(batch()))
    assert len(optimizers_of(model)) == 3
    kept = {id(v) for v in checkpointing.training_variables(model)}
    for optimizer in (model.critic_optimizer, model.generator_optimizer):
        assert {id(v) for v in optimizer.variables} <= kept


class Counts(layers.Layer):  # type: ignore[misc]
    """Counts its passes, and computes with the count."""

    def build(self, shape: Any) -> None:
        self.passes = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.passes.assign_add(1.0)
        return x * (1 + 0.01 * self.passes)


class Remembers(Counts):
    """Counts its passes, but computes nothing with it."""

    def call(self, x: Any, training: bool = False) -> Any:
        super().call(x, training)
        return x


def sequence(*inner: Any, **given: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), *inner, layers.Dense(2)])
    model.compile("sgd", "mse", **given)
    return model


def stateful() -> Any:
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH, 4)),
            layers.Reshape((4, 1)),
            layers.SimpleRNN(3, stateful=True),
            layers.Dense(2),
        ]
    )
    model.compile("sgd", "mse")
    return model


class OfOneSize(layers.Layer):
    """Cannot be called with other rows than those of a whole batch."""

    def call(self, inputs: Any) -> Any:
        return inputs + tf.ones((BATCH, 1), inputs.dtype)


def test_what_fails_in_a_graph_is_told_and_not_where_the_graph_was_made() -> None:
    model = sequence(OfOneSize())
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    found = StepFunction(model).cut(data)
    assert not found.possible
    assert "ncompatible shapes" in found.reason
    assert "Detected at node" not in found.reason


STATES = {
    "counts": (lambda: sequence(Counts()), "are not the mean"),
    "spectral": (
        lambda: sequence(layers.SpectralNormalization(layers.Dense(5))),
        "writes weights without an optimizer",
    ),
    "stateful": (stateful, "is stateful: it keeps a state"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_layer_whose_state_enters_its_output_is_not_cut(name: str) -> None:
    make, reason = STATES[name]
    model = make()
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    found = StepFunction(model).cut(data)
    assert not found.possible
    assert reason in found.reason


def root(y: Any, p: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean((y - p) ** 2))


def mean(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y - p))


def test_what_is_not_a_mean_over_samples_is_named() -> None:
    model = sequence(Remembers(), layers.Dropout(0.2), metrics=[root, mean])
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    found = StepFunction(model).cut(data)
    assert found.possible
    assert found.metrics == ("root",)
    assert len(found.state) == 1
    codes = [code for code, _ in caveats.of_a_cut(model, found, "micro_batch")]
    assert codes == ["metrics-of-micro-batches", "layer-state", "random-layers"]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_layer_that_could_draw_but_does_not_is_not_named(rate: float) -> None:
    model = sequence(layers.Reshape((4, 1)), layers.GRU(3, dropout=rate))
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    assert StepFunction(model).cut(data).draws == (rate > 0)


class WritesElsewhere(LowLevel):
    """Counts in a variable that is nobody's."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        COUNTER[0].assign_add(1.0)
        return logs


COUNTER: list[Any] = []


class SaysSo(LowLevel):
    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "text": tf.constant("hello")}


class DrawsStateful(LowLevel):
    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + tf.random.normal(tf.shape(x), dtype=x.dtype), y))


def test_variables_of_nobody_and_values_that_are_no_numbers() -> None:
    COUNTER[:] = [tf.Variable(0.0, name="counter")]
    data = slicing.as_tensors(batch())
    for cls, reason in ((WritesElsewhere, "Keras does not know"), (SaysSo, "'text'")):
        model = network(cls)
        building.from_batch(model, data)
        found = StepFunction(model).cut(data)
        assert not found.possible
        assert reason in found.reason
    assert COUNTER[0].numpy() == 0
    model = network(DrawsStateful)
    building.from_batch(model, data)
    found = StepFunction(model).cut(data)
    assert found.possible
    assert found.draws


class CountsInPython(LowLevel):
    calls = 0

    def train_step(self, data: Any) -> Any:
        self.calls += 1
        logs = super().train_step(data)
        return {**logs, "calls": float(self.calls)}


def test_numbers_kept_in_python_are_not_counted_once_a_part() -> None:
    model = network(CountsInPython)
    model.compile("sgd", run_eagerly=True)
    model.calls = 4
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    model.calls = 5
    found = StepFunction(model).cut(data)
    assert "in Python" in found.reason
    assert model.calls == 5


def test_a_variable_that_keras_does_not_know_is_named() -> None:
    model = network(LowLevel)
    model.beta = tf.Variable(1.0)
    ((code, text),) = caveats.of_variables(model)
    assert code == "variables-not-saved"
    assert ".beta" in text
    assert not list(caveats.of_variables(network(LowLevel)))


def test_a_layer_frozen_in_mid_training_is_trained_as_before() -> None:
    """As in plain Keras, whose step is traced already."""
    model = sequence(layers.Dense(5), layers.Dense(3))
    data = slicing.as_tensors(batch())
    building.from_batch(model, data)
    function = StepFunction(model)
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]]), data)
    spec = tf.nest.map_structure(
        lambda t, s: tf.TensorSpec(s.shape, t.dtype), data, spec
    )
    function.trace_for(spec)
    function.run(data, BATCH, BATCH)
    model.layers[0].trainable = False
    before = model.layers[0].kernel.numpy()
    assert function.cut(data).possible
    function.run(data, BATCH, 2)
    assert (model.layers[0].kernel.numpy() != before).any()
    assert not model.layers[0].trainable
    assert model.layers[1].trainable
