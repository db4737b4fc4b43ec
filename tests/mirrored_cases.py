"""Trains models with one device and with several, and prints how far they end apart.

In a process of its own: TensorFlow takes the number of CPU devices only before it is
first used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from oomrun.core.shares import Part
from oomrun.worker import building
from oomrun.worker.engine import slicing
from oomrun.worker.engine.mirrored_step import MirroredStep
from oomrun.worker.engine.step import StepFunction

DEVICES = 2
SAMPLES = 30
#: Shares and micro-batches, of one device after the other.
STEPS = (
    ((15, 15), (4, 15)),
    ((30, 0), (7, 1)),
    ((1, 29), (5, 30)),
)


def dense(**options: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


class Places(keras.layers.Layer):
    """Each part looks the very same rows of its table up: their gradients add up."""

    supports_masking = True

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(8, 5))

    def call(self, x: Any) -> Any:
        return x + tf.gather(self.table, tf.range(6))


def masked() -> Any:
    """Its loss is divided by what of the whole batch is not masked."""
    words = keras.Input((6,))
    found = keras.layers.Embedding(20, 5, mask_zero=True)(words)
    model = keras.Model(words, keras.layers.Dense(1)(Places()(found)))
    model.compile(keras.optimizers.Adam(0.1), "mse", weighted_metrics=["mae"])
    return model


class Two(keras.Model):
    """Two optimizers, one after the other, the second sees what the first has done."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.slow = keras.optimizers.SGD(0.01)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        losses = []
        for layer, optimizer in (
            (self.first, self.optimizer),
            (self.second, self.slow),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights, strict=True)
            )
            losses.append(loss)
        return {"first": losses[0], "second": losses[1]}


def two() -> Any:
    model = Two()
    model.compile(keras.optimizers.Adam(0.01))
    return model


CASES: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "eager": lambda: dense(run_eagerly=True),
    "masked": masked,
    "two_optimizers": two,
}


def data(name: str) -> Any:
    random = np.random.default_rng(0)
    if name == "masked":
        words = random.integers(0, 20, (SAMPLES, 6))
        return tf.constant(words), tf.constant(random.normal(size=(SAMPLES, 6, 1)))
    x, y = random.normal(size=(SAMPLES, 8)), random.normal(size=(SAMPLES, 1))
    return tf.constant(x), tf.constant(y)


def built(name: str, batch: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = CASES[name]()
    building.from_batch(model, batch)
    return model


def parts(shares: tuple[int, ...]) -> Iterator[Part]:
    start = 0
    for share in shares:
        yield Part(start, share, share)
        start += share


def apart(name: str) -> dict[str, float]:
    batch = data(name)
    one, several = built(name, batch), built(name, batch)
    step = StepFunction(one)
    mirrored = MirroredStep(several, [f"CPU:{n}" for n in range(DEVICES)])
    for each in (step, mirrored):
        assert each.cut(batch).possible, name
        each.trace_for(slicing.specs_of(batch))
    for shares, sizes in STEPS:
        expected = step.run(batch, SAMPLES, SAMPLES)
        found = mirrored.run_mirrored(batch, list(parts(shares)), sizes)
    pairs = zip(
        [*one.variables, *one.optimizer.variables, *one.metrics_variables],
        [*several.variables, *several.optimizer.variables, *several.metrics_variables],
        strict=True,
    )
    return {
        "variables": max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs),
        "logs": max(abs(float(expected[key]) - float(found[key])) for key in expected),
    }


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )
    keras.config.set_floatx("float64")
    json.dump({name: apart(name) for name in CASES}, sys.stdout)


if __name__ == "__main__":
    main()
