"""Small data and models that the rows share; all seeded, all in the default float."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

#: Samples and batch size: batches of 8, 8 and 6, in passes of 3 and less.
COUNT, BATCH = 22, 8


def array(*shape: int, seed: int = 0) -> Any:
    """Normal numbers."""
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(keras.config.floatx())


def regression(count: int = COUNT) -> tuple[Any, Any]:
    """Four features, two targets."""
    return array(count, 4, seed=1), array(count, 2, seed=2)


def classes(count: int = COUNT, kinds: int = 3) -> tuple[Any, Any]:
    """Four features, a class as an integer."""
    y = np.random.default_rng(3).integers(0, kinds, size=count)
    return array(count, 4, seed=1), y


def binary(count: int = COUNT) -> tuple[Any, Any]:
    """Four features, 0 or 1."""
    x, y = classes(count, 2)
    return x, y.astype(keras.config.floatx()).reshape(-1, 1)


def tokens(count: int = COUNT) -> tuple[Any, Any]:
    """Sequences of up to five tokens, padded with 0; a class for each token."""
    rng = np.random.default_rng(4)
    x = rng.integers(1, 7, size=(count, 5))
    x[np.arange(5) >= rng.integers(1, 6, size=(count, 1))] = 0
    return x, rng.integers(0, 4, size=(count, 5))


def weights(count: int = COUNT, *shape: int) -> Any:
    """Sample weights from 0 to 2, the first of them 0."""
    values = np.random.default_rng(5).uniform(0, 2, size=(count, *shape))
    values[0] = 0
    return values.astype(keras.config.floatx())


def dataset(*arrays: Any, batch: int | None = BATCH) -> Any:
    """``tf.data`` over the arrays; not batched if ``batch`` is None."""
    made = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return made if batch is None else made.batch(batch)


def dense(out: int = 2, activation: str | None = None) -> Any:
    """Two layers."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, "tanh"),
            layers.Dense(out, activation=activation),
        ]
    )


def compiled(optimizer: Any = "sgd", loss: Any = "mse", **given: Any) -> Any:
    """``dense``, compiled."""
    model = dense()
    model.compile(optimizer, loss, **given)
    return model


def classifier(**given: Any) -> Any:
    """``dense`` with a softmax over three classes, compiled."""
    model = dense(3, "softmax")
    model.compile("adam", "sparse_categorical_crossentropy", **given)
    return model


def tagger(loss: Any = None, **given: Any) -> Any:
    """Masked: a class for each token."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.Dense(4),
        ]
    )
    chosen = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", chosen, **given)
    return model


def two_outputs(as_dict: bool = True) -> Any:
    """Two inputs, two outputs, by name or by place; not compiled."""
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joined = layers.Dense(4, "tanh")(layers.Concatenate()([a, b]))
    p = layers.Dense(2, name="p")(joined)
    q = layers.Dense(1, activation="sigmoid", name="q")(joined)
    if as_dict:
        return keras.Model({"a": a, "b": b}, {"p": p, "q": q})
    return keras.Model([a, b], [p, q])


def two_data(as_dict: bool = True) -> tuple[Any, Any]:
    """Data for ``two_outputs``."""
    a, b = array(COUNT, 3, seed=6), array(COUNT, 2, seed=7)
    p, q = array(COUNT, 2, seed=8), binary()[1]
    if as_dict:
        return {"a": a, "b": b}, {"p": p, "q": q}
    return [a, b], [p, q]


def fit(model: Any, x: Any, y: Any = None, **given: Any) -> Any:
    """Two epochs, quietly, with batches of ``BATCH`` where Keras makes them."""
    if isinstance(x, np.ndarray | dict | list | tuple | tf.Tensor):
        given.setdefault("batch_size", BATCH)
    return model.fit(x, y, **{"epochs": 2, "verbose": 0, **given})
