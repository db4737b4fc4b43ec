"""A ``PyDataset`` that makes its batches when asked, in two threads."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(14)


class Waves(keras.utils.PyDataset):
    """Noisy sines; batch ``index`` of an epoch is the same in every run."""

    def __init__(self, samples, batch_size, **options):
        super().__init__(**options)
        self.samples, self.batch_size = samples, batch_size
        self.epoch = 0

    def __len__(self):
        return -(-self.samples // self.batch_size)

    def __getitem__(self, index):
        rng = np.random.default_rng([self.epoch, index])
        size = min(self.batch_size, self.samples - index * self.batch_size)
        frequency = rng.uniform(1, 4, size=(size, 1))
        waves = np.sin(frequency * np.linspace(0, 6, 64))
        waves += 0.1 * rng.normal(size=waves.shape)
        return waves[..., None], frequency, 1.0 / frequency[:, 0]

    def on_epoch_end(self):
        self.epoch += 1


model = keras.Sequential(
    [
        keras.Input((64, 1)),
        keras.layers.Conv1D(48, 5, activation="tanh", padding="same"),
        keras.layers.Dense(64, activation="softplus"),
        keras.layers.GlobalMaxPooling1D(),
        keras.layers.Dense(1),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.LogCosh(), weighted_metrics=["mse"]
)
history = model.fit(
    Waves(900, 360, workers=2, use_multiprocessing=False), epochs=2, verbose=2
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
