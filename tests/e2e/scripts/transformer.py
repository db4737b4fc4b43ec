"""Next-token prediction: a causal transformer block with masked, per-token losses."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# One operation at a time: else a step's peak of memory hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(6)

LENGTH, TOKENS, WIDTH = 64, 60, 32
rng = np.random.default_rng(6)
tokens = rng.integers(1, TOKENS, size=(300, LENGTH + 1))
for row, length in zip(tokens, rng.integers(8, LENGTH + 1, size=300), strict=True):
    row[length:] = 0  # padding


class Positions(layers.Layer):
    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.embedding = layers.Embedding(LENGTH, WIDTH)

    def build(self, shape):
        self.embedding.build(None)

    def call(self, x):
        return x + self.embedding(tf.range(LENGTH))


inputs = keras.Input((LENGTH,), dtype="int64")
x = Positions()(layers.Embedding(TOKENS, WIDTH, mask_zero=True)(inputs))
# Without biases: the gradient of a key's bias is zero but for rounding.
attention = layers.MultiHeadAttention(4, WIDTH // 4, use_bias=False)
attended = attention(x, x, use_causal_mask=True)
x = layers.LayerNormalization()(layers.Add()([x, attended]))
wide = layers.Dense(4 * WIDTH, activation="gelu")(x)
x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(WIDTH)(wide)]))
model = keras.Model(inputs, layers.Dense(TOKENS)(x))
model.compile(
    keras.optimizers.Adam(0.002, clipnorm=1.0, use_ema=True),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
)
history = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=128, epochs=1, verbose=2)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
