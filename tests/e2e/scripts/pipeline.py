"""A ``tf.data`` pipeline: shuffled, mapped, repeated for ever, counted in steps."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(15)

rng = np.random.default_rng(15)
images = rng.uniform(0, 255, size=(1000, 12, 12, 3)).astype("uint8")
labels = rng.integers(0, 5, size=1000)


def prepare(image, label):
    image = tf.cast(image, tf.float64) / 255.0
    return tf.image.flip_left_right(image), tf.one_hot(label, 5, dtype=tf.float64)


data = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .shuffle(1000, seed=15)
    .repeat()
    .map(prepare, num_parallel_calls=2)
    .batch(256)
    .prefetch(2)
)
model = keras.Sequential(
    [
        keras.Input((12, 12, 3)),
        keras.layers.UpSampling2D(4),
        keras.layers.DepthwiseConv2D(3, padding="same"),
        keras.layers.Dense(12, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(5, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.Lion(0.001),
    keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=["accuracy", keras.metrics.F1Score(average="macro")],
    steps_per_execution=2,
)
history = model.fit(data, steps_per_epoch=4, epochs=2, verbose=2)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
