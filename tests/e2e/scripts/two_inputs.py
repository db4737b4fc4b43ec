"""A functional model with two inputs and two outputs: dicts, loss and class weights."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(2)

rng = np.random.default_rng(2)
clicks = rng.normal(size=(1536, 32))
profile = rng.normal(size=(1536, 12))
bought = (clicks[:, 0] + profile[:, 0] > 0).astype("float64")[:, None]
spent = clicks[:, 1:2] - profile[:, 1:2]
weight = rng.uniform(0.2, 1.0, size=1536)


def branch(inputs, width):
    hidden = layers.Dense(width, activation="tanh")(inputs)
    return layers.LayerNormalization()(hidden)


one = keras.Input((32,), name="clicks")
other = keras.Input((12,), name="profile")
joined = layers.Concatenate()([branch(one, 2560), branch(other, 1280)])
hidden = layers.Dense(16, activation="relu", kernel_regularizer="l2")(joined)
model = keras.Model(
    {"clicks": one, "profile": other},
    {
        "bought": layers.Dense(1, activation="sigmoid", name="bought")(hidden),
        "spent": layers.Dense(1, name="spent")(hidden),
    },
)
model.compile(
    keras.optimizers.RMSprop(0.001),
    loss={"bought": "binary_crossentropy", "spent": keras.losses.Huber()},
    loss_weights={"bought": 1.0, "spent": 0.25},
    metrics={"bought": ["accuracy"], "spent": ["mae"]},
)
history = model.fit(
    {"clicks": clicks, "profile": profile},
    {"bought": bought, "spent": spent},
    sample_weight={"bought": weight, "spent": weight[::-1].copy()},
    batch_size=512,
    epochs=2,
    verbose=2,
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
