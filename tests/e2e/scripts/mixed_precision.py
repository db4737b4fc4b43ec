"""Mixed precision: float16 activations, float32 weights, a dynamic loss scale."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(12)

rng = np.random.default_rng(12)
inputs = rng.normal(size=(4096, 16)).astype("float32")
labels = (inputs[:, 0] > 0).astype("int32") + (inputs[:, 1] > 0)

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(4096, activation="tanh"),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(3),
        keras.layers.Activation("softmax", dtype="float32"),
    ]
)
model.compile(
    keras.optimizers.SGD(0.05, momentum=0.9),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(inputs, labels, batch_size=1024, epochs=2, verbose=2)
scale = model.optimizer.dynamic_scale.numpy()
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values, scale)
