"""Rows: evaluate, predict, single batches, and steps of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from engine.registry import row, section
from engine.samples import (
    BATCH,
    binary,
    classes,
    classifier,
    compiled,
    dataset,
    dense,
    fit,
    regression,
    tagger,
    tokens,
    two_data,
    two_outputs,
    weights,
)

section("Evaluation, prediction, single batches")

EVALUATION = {"micro": None, "cuts": False}


@row("`evaluate` of arrays, with weights and metrics", **EVALUATION)
def evaluate(folder: Path) -> Any:
    model = dense(1, "sigmoid")
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC()],
        weighted_metrics=["mae"],
    )
    given = {"batch_size": BATCH, "verbose": 0, "sample_weight": weights()}
    return model.evaluate(*binary(), **given, return_dict=True)


@row("`evaluate` of `tf.data`, several outputs", **EVALUATION, slow=True)
def evaluate_outputs(folder: Path) -> Any:
    model = two_outputs()
    model.compile("sgd", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]})
    data = dataset(*two_data())
    return model.evaluate(data, verbose=0), model.evaluate(data, steps=2, verbose=0)


@row("`evaluate`, masked", **EVALUATION)
def evaluate_masked(folder: Path) -> Any:
    model = tagger(metrics=["accuracy"])
    return model.evaluate(*tokens(), batch_size=BATCH, verbose=0)


@row("`predict` of arrays and of `tf.data`", **EVALUATION)
def predict(folder: Path) -> Any:
    model, (x, y) = dense(), regression()
    found = model.predict(x, batch_size=BATCH, verbose=0)
    return found, model.predict(dataset(x, y), verbose=0)


@row("`predict`, several outputs, `steps_per_execution`", **EVALUATION, slow=True)
def predict_outputs(folder: Path) -> Any:
    model = two_outputs()
    model.compile("sgd", "mse", steps_per_execution=2)
    return model.predict(two_data()[0], batch_size=BATCH, verbose=0)


@row("`train_on_batch`, with weights; metrics reset by hand")
def train_on_batch(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    found = []
    for x, y, w in dataset(*regression(), weights()):
        found.append(model.train_on_batch(x, y, sample_weight=w, return_dict=True))
    model.reset_metrics()
    found.append(model.train_on_batch(*regression(), return_dict=True))
    return found, model


@row("`train_on_batch` with `class_weight`", slow=True)
def train_on_batch_classes(folder: Path) -> Any:
    model = classifier(metrics=["accuracy"])
    return model.train_on_batch(*classes(), class_weight={0: 1, 1: 2, 2: 3}), model


@row("`test_on_batch`, `predict_on_batch`", **EVALUATION)
def test_on_batch(folder: Path) -> Any:
    model, (x, y) = compiled(metrics=["mae"]), regression()
    return model.test_on_batch(x, y), model.predict_on_batch(x)


section("Steps of the user's own")


class OwnStep(keras.Model):  # type: ignore[misc]
    """As Keras's guide writes it."""

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
        return {metric.name: metric.result() for metric in self.metrics}


class Clipped(keras.Model):  # type: ignore[misc]
    """Clips the gradients by hand."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.clip_by_norm(gradient, 0.05) for gradient in gradients]
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return self.compute_metrics(x, y, y_pred)


class Extended(keras.Model):  # type: ignore[misc]
    """Adds to what Keras's step returns."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs, "steps": self.optimizer.iterations}


def _own(kind: Any, **given: Any) -> Any:
    x = keras.Input((4,))
    model = kind(x, layers.Dense(2)(layers.Dense(5, "tanh")(x)))
    model.compile("adam", "mse", metrics=["mae"], **given)
    return fit(model, *regression()), model


@row("own `train_step`, as Keras's guide writes it")
def own_train_step(folder: Path) -> Any:
    return _own(OwnStep)


@row(
    "own `train_step`, gradients clipped by hand",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
)
def own_train_step_clipped(folder: Path) -> Any:
    return _own(Clipped)


@row(
    "own `train_step` around `super().train_step`",
    notes=("metrics-of-micro-batches",),
    differs="/steps$",
    slow=True,
)
def own_train_step_super(folder: Path) -> Any:
    return _own(Extended)


class Gan(keras.Model):  # type: ignore[misc]
    """Two optimizers, two gradients a step, no ``call``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(4), dense(1)

    def compile(self, one: Any, other: Any) -> None:
        super().compile()
        self.one, self.other = one, other

    def train_step(self, data: Any) -> Any:
        real = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            gap = self.critic(self.generator(real)) - self.critic(real)
            critic_loss = ops.mean(gap) + ops.mean(ops.square(gap))
        weights = self.critic.trainable_weights
        self.other.apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.generator(real)))
        weights = self.generator.trainable_weights
        self.one.apply(tape.gradient(loss, weights), weights)
        return {"critic": critic_loss, "generator": loss}


@row("own `train_step` with two optimizers (a GAN without a `call`)")
def own_train_step_gan(folder: Path) -> Any:
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    history = fit(model, regression()[0])
    return history, model.generator.get_weights(), model.critic.get_weights()


class OwnLoss(keras.Model):  # type: ignore[misc]
    """A ``compute_loss`` with a metric of its own, as Keras's guide writes it."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.tracker = keras.metrics.Mean(name="my_loss")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + ops.sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self) -> Any:
        return [self.tracker]

    def reset_metrics(self) -> None:
        self.tracker.reset_state()


@row("own `compute_loss`")
def own_compute_loss(folder: Path) -> Any:
    x = keras.Input((4,))
    model = OwnLoss(x, layers.Dense(2, kernel_regularizer="l2")(x))
    model.compile("adam")
    return fit(model, *regression()), model


class OwnEvaluation(keras.Model):  # type: ignore[misc]
    """Its own ``test_step`` and ``predict_step``."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        return ops.argmax(self(x, training=False), axis=-1)


@row("own `test_step` and `predict_step`")
def own_evaluation(folder: Path) -> Any:
    x = keras.Input((4,))
    model = OwnEvaluation(x, layers.Dense(2)(x))
    model.compile("adam", "mse", metrics=["mae"])
    history = fit(model, *regression(), validation_data=regression(16))
    return history, model.predict(regression()[0], batch_size=BATCH, verbose=0)


@row("a custom loop with `GradientTape`", cuts=False, tolerance=0)
def custom_loop(folder: Path) -> Any:
    model, optimizer = dense(), keras.optimizers.Adam()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return loss

    found = [float(step(x, y)) for x, y in dataset(*regression())]
    return found, model


section("Distribution")


def _within(strategy: Any) -> Any:
    with strategy.scope():
        model = compiled("adam", metrics=["mae"])
    return fit(model, *regression()), model


@row("a `OneDeviceStrategy` of the script's own")
def one_device(folder: Path) -> Any:
    return _within(tf.distribute.OneDeviceStrategy("CPU:0"))


@row("a `MirroredStrategy` of the script's own, one device")
def mirrored(folder: Path) -> Any:
    return _within(tf.distribute.MirroredStrategy(["CPU:0"]))


@row(
    "a `MirroredStrategy` of the script's own, two devices",
    notes=("not-split",),
    cuts=False,
)
def mirrored_two(folder: Path) -> Any:
    return _within(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
