"""A convolutional autoencoder, trained on its own inputs, with a sparsity penalty."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(7)

rng = np.random.default_rng(7)
images = rng.uniform(size=(88, 64, 64, 1))

encoder = keras.Sequential(
    [
        keras.Input((64, 64, 1)),
        layers.Conv2D(8, 3, activation="elu", padding="same"),
        layers.AveragePooling2D(8),
        layers.Conv2D(8, 3, activation="tanh", padding="same"),
        layers.Flatten(),
        layers.Dense(16, activation="sigmoid", activity_regularizer="l1"),
    ]
)
decoder = keras.Sequential(
    [
        keras.Input((16,)),
        layers.Dense(8 * 8 * 8, activation="tanh"),
        layers.Reshape((8, 8, 8)),
        layers.Conv2D(8, 3, activation="elu", padding="same"),
        layers.UpSampling2D(8),
        layers.Dense(16, activation="elu"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model = keras.Sequential([encoder, decoder])
model.compile(keras.optimizers.Nadam(0.002), "mse", metrics=["mae"])
history = model.fit(images, images, batch_size=32, epochs=2, shuffle=False, verbose=2)
codes = encoder.predict(images, batch_size=128, verbose=0)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values, codes)
