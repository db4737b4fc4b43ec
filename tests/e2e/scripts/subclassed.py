"""A subclassed model with its own ``call``, custom layer, loss function and metric."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)

rng = np.random.default_rng(3)
inputs = rng.normal(size=(1200, 24))
targets = np.stack([inputs[:, 0] * inputs[:, 1], inputs.sum(axis=1)], axis=1)


class Gated(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2 * self.units))
        self.scale = self.add_weight(shape=(self.units,), initializer="ones")

    def call(self, x):
        value, gate = tf.split(tf.matmul(x, self.kernel), 2, axis=-1)
        return self.scale * value * tf.sigmoid(gate)


class Residual(keras.Model):
    def __init__(self):
        super().__init__()
        self.wide = Gated(2048)
        self.back = keras.layers.Dense(24)
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(2)

    def call(self, x, training=False):
        for _ in range(2):  # the same layers twice
            x = self.norm(x + self.back(self.wide(x)))
        if training:
            self.add_loss(0.01 * tf.reduce_mean(tf.square(x)))
        return self.head(x)


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.reduce_max(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))
        self.value.assign(tf.maximum(self.value, error))

    def result(self):
        return self.value


def relative(y_true, y_pred):
    return tf.square(y_true - y_pred) / (1.0 + tf.abs(y_true))


model = Residual()
model.compile(
    keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, 20), global_clipnorm=1.0
    ),
    loss=relative,
    metrics=[Largest()],
)
history = model.fit(inputs, targets, batch_size=512, epochs=2, verbose=2)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
