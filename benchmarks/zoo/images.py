"""Networks over images and volumes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.zoo.entry import Entry, labels

__all__ = ["ENTRIES"]


def _pictures(samples: int, seed: int, *shape: int) -> tuple[Any, Any]:
    """Pictures and one of ten classes for each."""
    rng = np.random.default_rng(seed)
    return rng.random((samples, *shape), dtype="float32"), labels(rng, samples)


def _classifier(inputs: Any, hidden: Any) -> Any:
    # Its own dtype: a softmax in 16 bits is not what anybody trains with.
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(hidden)
    return keras.Model(inputs, outputs)


def cnn() -> Any:
    """Convolutions and pooling, the textbook's."""
    inputs = hidden = keras.Input((32, 32, 3))
    for filters in (16, 16, 32):
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Dense(64, activation="relu")(layers.Flatten()(hidden))
    return _classifier(inputs, layers.Dropout(0.3)(hidden))


def _normalized(hidden: Any, filters: int, strides: int = 1) -> Any:
    hidden = layers.Conv2D(filters, 3, strides, "same", use_bias=False)(hidden)
    return layers.BatchNormalization()(hidden)


def resnet() -> Any:
    """Residual blocks with batch normalization."""
    inputs = keras.Input((32, 32, 3))
    hidden = layers.ReLU()(_normalized(inputs, 8))
    for filters, strides in ((8, 1), (16, 2), (32, 2)):
        beside = hidden
        if strides > 1:
            beside = layers.Conv2D(filters, 1, strides)(hidden)
        hidden = layers.ReLU()(_normalized(hidden, filters, strides))
        hidden = layers.ReLU()(beside + _normalized(hidden, filters))
    return _classifier(inputs, layers.GlobalAveragePooling2D()(hidden))


def unet() -> Any:
    """Down and up again with what was seen on the way, a mask for each pixel."""
    inputs = hidden = keras.Input((48, 48, 1))
    seen = []
    for filters in (4, 8):
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
        seen.append(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Conv2D(12, 3, padding="same", activation="relu")(hidden)
    for filters in (8, 4):
        hidden = layers.UpSampling2D()(hidden)
        hidden = layers.Concatenate()([hidden, seen.pop()])
        hidden = layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(hidden))


def _masks(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.random((samples, 48, 48, 1), dtype="float32")
    return x, (x > 0.5).astype("float32")


def depthwise() -> Any:
    """Depthwise and pointwise convolutions, as in MobileNet."""
    inputs = keras.Input((32, 32, 3))
    hidden = layers.ReLU(6.0)(_normalized(inputs, 8, 2))
    for filters, strides in ((16, 1), (32, 2), (32, 1), (64, 2)):
        hidden = layers.DepthwiseConv2D(3, strides, "same", use_bias=False)(hidden)
        hidden = layers.ReLU(6.0)(layers.BatchNormalization()(hidden))
        hidden = layers.Conv2D(filters, 1, use_bias=False)(hidden)
        hidden = layers.ReLU(6.0)(layers.BatchNormalization()(hidden))
    return _classifier(inputs, layers.GlobalAveragePooling2D()(hidden))


def autoencoder() -> Any:
    """Convolutions to a code, transposed ones back to the picture."""
    inputs = hidden = keras.Input((32, 32, 1))
    for filters in (12, 24):
        hidden = layers.Conv2D(filters, 3, 2, "same", activation="relu")(hidden)
    code = layers.Dense(32)(layers.Flatten()(hidden))
    hidden = layers.Reshape((8, 8, 24))(layers.Dense(8 * 8 * 24)(code))
    for filters in (24, 12):
        hidden = layers.Conv2DTranspose(filters, 3, 2, "same", activation="relu")(
            hidden
        )
    outputs = layers.Conv2D(1, 3, padding="same", activation="sigmoid")(hidden)
    return keras.Model(inputs, outputs)


def _itself(samples: int, seed: int) -> tuple[Any, Any]:
    x, _ = _pictures(samples, seed, 32, 32, 1)
    return x, x


def conv3d() -> Any:
    """Convolutions over volumes."""
    inputs = keras.Input((12, 20, 20, 1))
    hidden = layers.Conv3D(4, 3, padding="same", activation="relu")(inputs)
    hidden = layers.Conv3D(12, 1, use_bias=False)(hidden)
    hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
    hidden = layers.MaxPooling3D()(layers.Dropout(0.1)(hidden))
    hidden = layers.Conv3D(8, 3, activation="relu")(hidden)
    return _classifier(inputs, layers.GlobalAveragePooling3D()(hidden))


def wide() -> Any:
    """Large pictures and many channels: few samples fill the memory."""
    inputs = hidden = keras.Input((96, 96, 3))
    hidden = layers.Conv2D(32, 3, 2, "same")(hidden)
    for filters in (32, 64):
        hidden = layers.GroupNormalization(8)(hidden)
        hidden = layers.Activation("gelu")(hidden)
        hidden = layers.Conv2D(filters, 3, 2, "same")(hidden)
    return _classifier(inputs, layers.GlobalMaxPooling2D()(hidden))


def siamese() -> Any:
    """Two pictures through one network: are they alike?"""
    picture = hidden = keras.Input((28, 28, 1))
    for filters in (8, 16):
        hidden = layers.Conv2D(filters, 3, activation="relu")(hidden)
        hidden = layers.AveragePooling2D(2)(hidden)
    hidden = layers.Dense(32)(layers.Flatten()(hidden))
    encoder = keras.Model(picture, layers.UnitNormalization()(hidden))
    pair = [keras.Input((28, 28, 1), name=name) for name in ("left", "right")]
    distance = layers.Subtract()([encoder(picture) for picture in pair])
    outputs = layers.Dense(1, activation="sigmoid")(keras.ops.abs(distance))
    return keras.Model(pair, outputs)


def _pairs(samples: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = {
        name: rng.random((samples, 28, 28, 1), dtype="float32")
        for name in ("left", "right")
    }
    return x, labels(rng, samples, 2).astype("float32")[:, None]


def mixed() -> Any:
    """Convolutions in 16 bits, weights in 32, a loss that is scaled."""
    inputs = hidden = keras.Input((40, 40, 1))
    for filters in (8, 12):
        hidden = layers.Conv2D(filters, 3, padding="same")(hidden)
        hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
        hidden = layers.MaxPooling2D()(layers.Dropout(0.1)(hidden))
    return _classifier(inputs, layers.Flatten()(hidden))


def vit() -> Any:
    """A transformer over the patches of a picture."""
    inputs = keras.Input((32, 32, 3))
    hidden = layers.Conv2D(48, 4, 4)(inputs)
    hidden = layers.Reshape((64, 48))(hidden)
    places = layers.Embedding(64, 48)(keras.ops.arange(64))
    hidden = hidden + places
    for _ in range(2):
        normal = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(4, 12)(normal, normal)
        normal = layers.LayerNormalization()(hidden)
        wider = layers.Dense(96, activation="gelu")(normal)
        hidden = hidden + layers.Dense(48)(layers.Dropout(0.1)(wider))
    return _classifier(inputs, layers.GlobalAveragePooling1D()(hidden))


_CLASSES = "sparse_categorical_crossentropy"

ENTRIES = (
    Entry(
        name="cnn", network=cnn, loss=_CLASSES, batch=512, limits=(105, 125, 145),
        data=lambda samples, seed: _pictures(samples, seed, 32, 32, 3),
    ),
    Entry(
        name="resnet", network=resnet, loss=_CLASSES, batch=256, limits=(90, 105, 125),
        data=lambda samples, seed: _pictures(samples, seed, 32, 32, 3),
    ),
    Entry(
        name="unet", network=unet, loss="binary_crossentropy", batch=256,
        limits=(100, 120, 145), data=_masks,
    ),
    Entry(
        name="depthwise", network=depthwise, loss=_CLASSES, batch=1024,
        limits=(110, 135, 165),
        data=lambda samples, seed: _pictures(samples, seed, 32, 32, 3),
    ),
    Entry(
        name="autoencoder", network=autoencoder, loss="mean_squared_error", batch=512,
        limits=(105, 120, 140), data=_itself,
    ),
    Entry(
        name="conv3d", network=conv3d, loss=_CLASSES, batch=96, limits=(75, 120, 150),
        data=lambda samples, seed: _pictures(samples, seed, 12, 20, 20, 1),
    ),
    Entry(
        name="wide", network=wide, loss=_CLASSES, batch=128, limits=(150, 200, 270),
        data=lambda samples, seed: _pictures(samples, seed, 96, 96, 3),
    ),
    Entry(
        name="siamese", network=siamese, loss="binary_crossentropy", batch=1024,
        limits=(90, 105, 125), data=_pairs,
    ),
    Entry(
        name="mixed", network=mixed, loss=_CLASSES, batch=256, limits=(70, 78, 88),
        data=lambda samples, seed: _pictures(samples, seed, 40, 40, 1),
        policy="mixed_float16",
    ),
    Entry(
        name="vit", network=vit, loss=_CLASSES, batch=256, limits=(60, 90, 130),
        data=lambda samples, seed: _pictures(samples, seed, 32, 32, 3),
    ),
)  # fmt: skip
