"""Trains a while, needs more memory than it gets, and keeps what it should not."""

import time

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(2048, 28, 28, 1)).astype("float32")
y = rng.integers(0, 10, 2048)
kept = []


class Keeping(keras.callbacks.Callback):
    """A leak of 1 MiB a step; and some time, for there to be something to watch."""

    def on_train_batch_end(self, batch, logs=None):
        kept.append(tf.fill([2**18], 1.0 + len(kept)))
        time.sleep(0.3)


model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(x, y, batch_size=256, epochs=12, verbose=0, callbacks=[Keeping()])
model.evaluate(x, y, batch_size=1024, verbose=0)
