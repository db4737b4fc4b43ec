"""A small convolutional classifier: validation split, callbacks, evaluate, predict."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(1)

rng = np.random.default_rng(1)
images = rng.normal(size=(880, 8, 8, 1))
labels = (images.mean(axis=(1, 2, 3)) > 0).astype("int64")

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.UpSampling2D(8),
        keras.layers.Conv2D(8, 3, activation="tanh", padding="same"),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    "sparse_categorical_crossentropy",
    metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="nats")],
)
history = model.fit(
    images,
    labels,
    batch_size=256,
    epochs=2,
    verbose=2,
    validation_split=0.2,
    validation_batch_size=64,
    callbacks=[
        keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1),
    ],
)
score = model.evaluate(images, labels, batch_size=128, verbose=0)
predicted = model.predict(images, batch_size=128, verbose=0)

values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values, score, predicted)
