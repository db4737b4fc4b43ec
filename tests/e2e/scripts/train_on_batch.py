"""A loop of the user's own around ``train_on_batch`` and ``test_on_batch``."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(13)

rng = np.random.default_rng(13)
inputs = rng.normal(size=(1400, 32))
targets = np.cos(inputs[:, :2])

model = keras.Sequential(
    [
        keras.Input((32,)),
        keras.layers.Dense(4096, activation="gelu"),
        keras.layers.Dense(2),
    ]
)
model.compile(keras.optimizers.Adam(0.001), "mae", metrics=["mse"])

seen = []
for epoch in range(2):
    order = rng.permutation(len(inputs))
    for start in range(0, len(order), 512):
        rows = order[start : start + 512]
        logs = model.train_on_batch(inputs[rows], targets[rows], return_dict=True)
        seen.append([logs["loss"], logs["mse"]])
    model.reset_metrics()
    print(epoch, seen[-1], flush=True)
    seen.append(model.test_on_batch(inputs[:128], targets[:128]))
    model.reset_metrics()
np.savez("weights.npz", *model.get_weights(), np.array(seen))
