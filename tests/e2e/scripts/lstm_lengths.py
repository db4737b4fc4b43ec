"""An LSTM on sentences of many lengths: ragged data, padded a batch, masked."""

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(5)

rng = np.random.default_rng(5)
lengths = rng.integers(3, 49, size=400)
lengths[::100] = 48
sentences = tf.RaggedTensor.from_row_lengths(
    rng.integers(1, 200, size=lengths.sum()), lengths
)
parities = np.array([words.sum() % 3 for words in sentences.numpy()])

data = (
    tf.data.Dataset.from_tensor_slices((sentences, parities))
    .batch(256)
    .map(lambda words, parity: (words.to_tensor(), parity))
    .prefetch(1)
)
model = keras.Sequential(
    [
        keras.Input((None,), dtype="int64"),
        keras.layers.Embedding(200, 16, mask_zero=True),
        keras.layers.LSTM(80, return_sequences=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(data, epochs=2, verbose=2)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
