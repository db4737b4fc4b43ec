"""A model of which a pass takes about 0.6 MiB a sample, and a neighbour to it."""

from __future__ import annotations

__all__ = ["START"]

#: The beginning of a script: 250 samples, the model compiled, ``fill(bytes)``.
START = """
import os
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 8))
y = np.sin(x @ random.normal(size=(8, 1)))
model = keras.Sequential([
    keras.Input((8,)),
    keras.layers.Dense(16384),
    keras.layers.Activation("tanh"),
    keras.layers.Activation("sigmoid"),
    keras.layers.Activation("tanh"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.0001), "mse", metrics=["mae"])
def fill(up_to):
    taken = []
    # In small pieces: a large one may be given nearly twice what it asks for.
    while tf.config.experimental.get_memory_info("CPU:0")["current"] < up_to:
        taken.append(tf.zeros([2**14], tf.float64))
    return taken
"""
