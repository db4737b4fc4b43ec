"""Networks over rows of numbers and of identifiers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.zoo.entry import Entry, labels

__all__ = ["ENTRIES"]

_USERS, _ITEMS, _SEEN = 30_000, 10_000, 50


def dense() -> Any:
    """Dense layers alone, deep rather than wide."""
    inputs = hidden = keras.Input((64,))
    for _ in range(10):
        hidden = layers.Dense(128, activation="relu")(hidden)
        hidden = layers.Dropout(0.1)(hidden)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(hidden))


def _rows(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.random((samples, 64), dtype="float32"), labels(rng, samples)


def recommender() -> Any:
    """Large tables of users and items, a small network on what is looked up."""
    user = keras.Input((), dtype="int32", name="user")
    seen = keras.Input((_SEEN,), dtype="int32", name="seen")
    taste = layers.Embedding(_USERS, 32)(user)
    items = layers.Embedding(_ITEMS, 32)(seen)
    weights = layers.Softmax(axis=1)(layers.Dense(1)(items))
    interest = keras.ops.sum(items * weights, axis=1)
    hidden = layers.Concatenate()([taste, interest, taste * interest])
    for width in (128, 64):
        hidden = layers.Dense(width, activation="relu")(hidden)
    return keras.Model([user, seen], layers.Dense(1, activation="sigmoid")(hidden))


def _visits(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = {
        "user": rng.integers(0, _USERS, samples, dtype="int32"),
        "seen": rng.integers(0, _ITEMS, (samples, _SEEN), dtype="int32"),
    }
    return x, labels(rng, samples, 2).astype("float32")[:, None]


ENTRIES = (
    Entry(
        name="dense", network=dense, loss="sparse_categorical_crossentropy",
        batch=16384, limits=(60, 100, 160), data=_rows,
    ),
    Entry(
        name="recommender", network=recommender, loss="binary_crossentropy",
        batch=8192, limits=(150, 165, 185), data=_visits,
    ),
)  # fmt: skip
