"""A loop of the user's own, with a ``tf.data`` set, through ``oomrun.Loop``."""

import keras
import numpy as np
import tensorflow as tf

import oomrun

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(16)

rng = np.random.default_rng(16)
inputs = rng.normal(size=(1280, 32))
labels = (inputs[:, 0] * inputs[:, 1] > 0).astype("int64")
data = tf.data.Dataset.from_tensor_slices((inputs, labels))
data = data.shuffle(1280, seed=16).batch(512)

model = keras.Sequential(
    [
        keras.Input((32,)),
        keras.layers.Dense(4096, activation="gelu"),
        keras.layers.Dense(2),
    ]
)
optimizer = keras.optimizers.Adam(0.001, global_clipnorm=1.0)
accuracy = keras.metrics.SparseCategoricalAccuracy()


def loss(batch):
    x, y = batch
    logits = model(x, training=True)
    accuracy.update_state(y, logits)
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


loop = oomrun.Loop(loss, optimizer, state=[model, accuracy])
loop.values["seen"] = []
for epoch in loop.epochs(2):
    accuracy.reset_state()
    for batch in loop.batches(data):
        value = loop.step(batch)
        loop.values["seen"] += [float(value), float(accuracy.result())]
    print(epoch, loop.values["seen"][-2:], flush=True)
np.savez("weights.npz", *model.get_weights(), loop.values["seen"])
