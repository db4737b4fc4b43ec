"""A ``train_step`` of the form that Keras's guides teach: one tape, one optimizer."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(9)

rng = np.random.default_rng(9)
inputs = rng.normal(size=(1280, 32))
targets = np.tanh(inputs[:, :1] * inputs[:, 1:2])
weights = rng.uniform(0.5, 1.5, size=1280)


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y, sample_weight = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


x = keras.Input((32,))
hidden = keras.layers.Dense(4096, activation="gelu")(x)
hidden = keras.layers.Dense(16, activation="relu")(hidden)
model = CustomModel(x, keras.layers.Dense(1)(hidden))
model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
history = model.fit(
    inputs, targets, sample_weight=weights, batch_size=512, epochs=2, verbose=2
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
