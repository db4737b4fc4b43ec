"""Networks over series and texts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.zoo.entry import Entry, labels

__all__ = ["ENTRIES"]

_WORDS = 2000


def lstm() -> Any:
    """A recurrent network over series of measurements."""
    inputs = keras.Input((32, 16))
    hidden = layers.LSTM(48, return_sequences=True)(inputs)
    hidden = layers.LSTM(32)(hidden)
    return keras.Model(inputs, layers.Dense(4)(hidden))


def _series(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.random((samples, 32, 16), dtype="float32")
    return x, x[:, -1, :4]


def gru() -> Any:
    """A recurrent network over texts of unlike lengths, masked."""
    inputs = keras.Input((40,), dtype="int32")
    hidden = layers.Embedding(_WORDS, 32, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.GRU(32))(hidden)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))


def _padded(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.integers(1, _WORDS, (samples, 40), dtype="int32")
    lengths = rng.integers(1, 41, (samples, 1))
    x = np.where(np.arange(40) < lengths, x, 0).astype("int32")
    return x, labels(rng, samples, 2).astype("float32")[:, None]


def _block(hidden: Any, width: int, *, causal: bool) -> Any:
    attention = layers.MultiHeadAttention(4, width // 4, dropout=0.1)
    attended = attention(hidden, hidden, use_causal_mask=causal)
    hidden = layers.LayerNormalization()(hidden + attended)
    wider = layers.Dense(4 * width, activation="gelu")(hidden)
    return layers.LayerNormalization()(hidden + layers.Dense(width)(wider))


def _words_in_place(tokens: Any, length: int, width: int) -> Any:
    places = layers.Embedding(length, width)(keras.ops.arange(length))
    return layers.Embedding(_WORDS, width)(tokens) + places


def encoder() -> Any:
    """A transformer that reads a text and classifies it."""
    tokens = keras.Input((64,), dtype="int32")
    hidden = _words_in_place(tokens, 64, 32)
    for _ in range(2):
        hidden = _block(hidden, 32, causal=False)
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(tokens, layers.Dense(10, activation="softmax")(pooled))


def _texts(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, _WORDS, (samples, 64), dtype="int32")
    return x, labels(rng, samples)


def decoder() -> Any:
    """A language model: the next word at each place, seeing those before it only."""
    tokens = keras.Input((32,), dtype="int32")
    hidden = _words_in_place(tokens, 32, 32)
    for _ in range(2):
        hidden = _block(hidden, 32, causal=True)
    return keras.Model(tokens, layers.Dense(_WORDS, activation="softmax")(hidden))


def _next_words(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, _WORDS, (samples, 33), dtype="int32")
    return x[:, :-1].copy(), x[:, 1:].copy()


ENTRIES = (
    Entry(
        name="lstm", network=lstm, loss="mean_squared_error", batch=2048,
        limits=(60, 100, 160), data=_series,
    ),
    Entry(
        name="gru", network=gru, loss="binary_crossentropy", batch=2048,
        limits=(60, 90, 140), data=_padded,
    ),
    Entry(
        name="encoder", network=encoder, loss="sparse_categorical_crossentropy",
        batch=256, limits=(60, 100, 160), data=_texts,
    ),
    Entry(
        name="decoder", network=decoder, loss="sparse_categorical_crossentropy",
        batch=256, limits=(60, 85, 120), data=_next_words,
    ),
)  # fmt: skip
