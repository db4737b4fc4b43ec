"""A plain Keras script with what differs most between versions of Keras.

Masks, sample weights, regularisation, a schedule, callbacks, a partial last batch,
two fits (arrays, then a data pipeline), evaluate, predict. All in double precision, so
that runs can be compared to 1e-10. Usage: train.py OUTPUT.npz
"""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(7)
random = np.random.default_rng(7)
tokens = random.integers(1, 50, size=(300, 12))
tokens[random.random(tokens.shape) < 0.3] = 0
word_weights = random.uniform(0.2, 2.0, size=tokens.shape)
total_weights = random.uniform(0.2, 2.0, size=300)
words = (tokens + 1) % 50
total = tokens.sum(axis=1, keepdims=True) / 100.0

inputs = keras.Input((12,), dtype="int32")
states = keras.layers.Embedding(50, 16, mask_zero=True)(inputs)
states = keras.layers.LSTM(16, return_sequences=True)(states)
word = keras.layers.Dense(50, activation="softmax", name="word")(states)
last = keras.layers.LSTM(8)(states)
value = keras.layers.Dense(1, kernel_regularizer="l2", name="total")(last)
model = keras.Model(inputs, {"word": word, "total": value})
model.compile(
    optimizer=keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9), global_clipnorm=1.0
    ),
    loss={"word": "sparse_categorical_crossentropy", "total": "mse"},
    loss_weights={"word": 1.0, "total": 0.5},
    metrics={"word": ["accuracy"], "total": ["mae"]},
)
first = model.fit(
    tokens,
    {"word": words, "total": total},
    sample_weight={"word": word_weights, "total": total_weights},
    batch_size=64,
    epochs=2,
    callbacks=[keras.callbacks.EarlyStopping("loss", patience=3)],
    verbose=2,
)
data = tf.data.Dataset.from_tensor_slices((tokens, {"word": words, "total": total}))
data = data.shuffle(300, seed=3).batch(64)
second = model.fit(data, epochs=2, validation_data=data.take(1), verbose=2)
scores = model.evaluate(data, verbose=0)
predicted = model.predict(tokens, batch_size=64, verbose=0)
np.savez(
    sys.argv[1],
    *[np.asarray(weight) for weight in model.get_weights()],
    losses=[*first.history["loss"], *second.history["loss"]],
    validation=second.history["val_loss"],
    scores=scores[0],
    total=predicted["total"],
)
