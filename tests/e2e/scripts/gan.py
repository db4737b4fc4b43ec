"""A GAN with its own ``train_step``: two networks, two optimizers, two tapes.

The noise is part of the data, so that two runs of the script see the same.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(8)

rng = np.random.default_rng(8)
images = rng.uniform(-1, 1, size=(320, 32, 32, 1))
noise = rng.normal(size=(320, 8))

discriminator = keras.Sequential(
    [
        keras.Input((32, 32, 1)),
        layers.Conv2D(32, 3, padding="same"),
        layers.LeakyReLU(0.2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input((8,)),
        layers.Dense(4 * 4 * 8, activation="relu"),
        layers.Reshape((4, 4, 8)),
        layers.UpSampling2D(8),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.Dense(16, activation="tanh"),
        layers.Dense(1, activation="tanh"),
    ],
    name="generator",
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, latent = data
        batch_size = tf.shape(real)[0]

        fake = self.generator(latent)
        both = tf.concat([fake, real], axis=0)
        labels = tf.concat(
            [tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0
        )
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )

        misleading = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            verdict = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(misleading, verdict)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(
            zip(grads, self.generator.trainable_weights, strict=True)
        )

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {
            "d_loss": self.d_loss_metric.result(),
            "g_loss": self.g_loss_metric.result(),
        }


gan = GAN(discriminator, generator)
gan.compile(
    d_optimizer=keras.optimizers.Adam(0.0003),
    g_optimizer=keras.optimizers.Adam(0.0003),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
data = tf.data.Dataset.from_tensor_slices((images, noise)).batch(128)
history = gan.fit(data, epochs=1, verbose=2)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *discriminator.get_weights(), *generator.get_weights(), *values)
