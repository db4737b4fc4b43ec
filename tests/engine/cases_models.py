"""Rows: kinds of models and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import layers, ops

from engine.registry import STEPS_ONLY, row, section
from engine.samples import (
    BATCH,
    COUNT,
    array,
    dataset,
    dense,
    fit,
    regression,
    tagger,
    tokens,
)

section("Models and layers")


def _trained(*inner: Any, x: Any = None, optimizer: Any = "adam") -> Any:
    """A model of these layers, trained on the regression's targets."""
    x = regression()[0] if x is None else x
    model = keras.Sequential([keras.Input(x.shape[1:]), *inner, layers.Dense(2)])
    model.compile(optimizer, "mse")
    return fit(model, x, regression()[1]), model


@row("Sequential, functional with a model inside", slow=True)
def nested(folder: Path) -> Any:
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2)(dense(3)(x)))
    model.compile("adam", "mse")
    return fit(model, *regression()), model


class Own(keras.Model):  # type: ignore[misc]
    """Subclassed: a loop, an argument ``training``, a weight without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(4, "tanh") for _ in range(2)]
        self.head, self.unused = layers.Dense(2), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = x + block(x)
        self.unused(x)
        return self.head(x) * (1.1 if training else 1.0)


@row("subclassed, with its own `call` and an unused weight")
def subclassed(folder: Path) -> Any:
    model = Own()
    model.compile("adam", "mse", metrics=["mae"])
    return fit(model, *regression(), validation_split=0.3), model


@row("shared layers (siamese)")
def shared(folder: Path) -> Any:
    a, b = keras.Input((4,)), keras.Input((4,))
    encoder = layers.Dense(3, "tanh")
    model = keras.Model([a, b], layers.Dense(2)(encoder(a) - encoder(b)))
    model.compile("adam", "mse")
    x, y = regression()
    return fit(model, [x, x[::-1].copy()], y), model


@row("frozen layers")
def frozen(folder: Path) -> Any:
    model = dense()
    model.layers[0].trainable = False
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("all layers frozen")
def all_frozen(folder: Path) -> Any:
    model = dense()
    model.trainable = False
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("convolutions, pooling")
def convolutions(folder: Path) -> Any:
    inner = layers.Conv2D(3, 3, activation="relu"), layers.MaxPooling2D()
    return _trained(*inner, layers.Flatten(), x=array(COUNT, 6, 6, 1))


@row("LSTM")
def lstm(folder: Path) -> Any:
    return _trained(layers.LSTM(2), x=array(COUNT, 3, 2))


@row("a recurrent network with `mask_zero`")
def recurrent_masked(folder: Path) -> Any:
    x, y = tokens()
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.SimpleRNN(2, return_sequences=True),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return fit(model, x, y, epochs=1), model


@row("attention, LayerNormalization (a transformer block)")
def transformer(folder: Path) -> Any:
    x = keras.Input((4, 6))
    attended = layers.MultiHeadAttention(2, 3)(x, x)
    hidden = layers.LayerNormalization()(x + attended)
    pooled = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(x, layers.Dense(2)(pooled))
    model.compile("adam", "mse")
    return fit(model, array(COUNT, 4, 6), regression()[1]), model


@row("GroupNormalization, UnitNormalization, RMSNormalization")
def normalizations(folder: Path) -> Any:
    return _trained(
        layers.Dense(6),
        layers.GroupNormalization(2),
        layers.RMSNormalization(),
        layers.UnitNormalization(),
    )


@row("Embedding: sparse gradients")
def embedding(folder: Path) -> Any:
    model = tagger()
    return fit(model, *tokens()), model


@row(
    "Embedding: sparse gradients, clipped by global norm, SGD with momentum", slow=True
)
def embedding_clipped(folder: Path) -> Any:
    x, y = tokens()
    model = keras.Sequential(
        [layers.Embedding(7, 3), layers.Flatten(), layers.Dense(5)]
    )
    model.compile(keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.1), "mse")
    return fit(model, x, y.astype("float64")), model


@row("an embedding tied to the output (`ReversibleEmbedding`)")
def embedding_tied(folder: Path) -> Any:
    x, y = tokens()
    inputs = keras.Input((5,), dtype="int32")
    tied = layers.ReversibleEmbedding(7, 3)
    model = keras.Model(inputs, tied(tied(inputs), reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return fit(model, x, y), model


@row("preprocessing layers in the model (Normalization, Discretization)", slow=True)
def preprocessing(folder: Path) -> Any:
    normalize = layers.Normalization()
    normalize.adapt(regression()[0])
    return _trained(normalize, layers.Discretization([-1.0, 0.0, 1.0]))


@row("Lambda layers, `ops` in a functional model", slow=True)
def functional_ops(folder: Path) -> Any:
    x = keras.Input((4,))
    squared = layers.Lambda(lambda value: value * value)(x)
    model = keras.Model(x, layers.Dense(2)(ops.concatenate([x, squared], axis=-1)))
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("BatchNormalization", notes=("batch-norm",), differs=STEPS_ONLY)
def batch_norm(folder: Path) -> Any:
    return _trained(layers.Dense(5), layers.BatchNormalization())


@row("BatchNormalization, uncut: bit for bit", micro=None, tolerance=0, slow=True)
def batch_norm_uncut(folder: Path) -> Any:
    return _trained(layers.Dense(5), layers.BatchNormalization())


@row("BatchNormalization, frozen", notes=("batch-norm",))
def batch_norm_frozen(folder: Path) -> Any:
    return _trained(layers.Dense(5), layers.BatchNormalization(trainable=False))


def _random_layers() -> Any:
    return _trained(layers.Dense(5), layers.Dropout(0.5), layers.GaussianNoise(0.1))


@row("Dropout, GaussianNoise, uncut: bit for bit", micro=None, tolerance=0, slow=True)
def dropout_uncut(folder: Path) -> Any:
    return _random_layers()


@row(
    "Dropout, GaussianNoise",
    notes=("random-layers",),
    differs=STEPS_ONLY,
    remark="cut, they draw other numbers of the same distribution",
)
def dropout(folder: Path) -> Any:
    return _random_layers()


@row("Dropout, evaluated and predicted with", micro=None)
def dropout_evaluated(folder: Path) -> Any:
    model = dense()
    model.add(layers.Dropout(0.5))
    model.compile("adam", "mse", metrics=["mae"])
    x, y = regression()
    return model.evaluate(x, y, batch_size=BATCH, verbose=0), model.predict(
        x, verbose=0
    )


@row("augmentation layers, uncut: bit for bit", micro=None, tolerance=0, slow=True)
def augmentation_uncut(folder: Path) -> Any:
    inner = layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2), layers.Flatten()
    return _trained(*inner, x=array(COUNT, 4, 4, 1))


class Sampled(layers.Layer):  # type: ignore[misc]
    """Draws whether training or not, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        drawn = keras.random.normal(ops.shape(x), seed=self.seed_generator)
        return x + 0.1 * drawn


@row(
    "random numbers in training and evaluation (a variational autoencoder)",
    notes=("random-layers",),
    differs=STEPS_ONLY,
    remark="cut, it draws other numbers of the same distribution",
)
def sampled(folder: Path) -> Any:
    return _trained(Sampled())


class Counting(layers.Layer):  # type: ignore[misc]
    """Counts its passes in a variable of its own, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.passes.assign_add(1)
        return x / (1 + self.passes)


@row(
    "a layer that changes a state of its own in each pass",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
    evaluate=None,
)
def layer_state(folder: Path) -> Any:
    return _trained(Counting())


@row("SpectralNormalization", notes=("not-separable",), cuts=False, tolerance=0)
def spectral(folder: Path) -> Any:
    return _trained(layers.SpectralNormalization(layers.Dense(5)))


@row(
    "a stateful recurrent network, uncut",
    micro=None,
    evaluate=None,
    tolerance=0,
    slow=True,
)
def stateful_uncut(folder: Path) -> Any:
    return _stateful()


def _stateful() -> Any:
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH, 4, 3)),
            layers.SimpleRNN(3, stateful=True),
            layers.Dense(2),
        ]
    )
    model.compile("adam", "mse")
    x, y = array(2 * BATCH, 4, 3), array(2 * BATCH, 2)
    return fit(model, x, y, shuffle=False), model


@row("a stateful recurrent network", notes=("not-separable",), cuts=False, tolerance=0)
def stateful(folder: Path) -> Any:
    return _stateful()


class Centred(layers.Layer):  # type: ignore[misc]
    """Subtracts the batch's mean: samples depend on each other."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


@row(
    "a layer that mixes samples of a batch",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
    evaluate=None,
)
def mixing(folder: Path) -> Any:
    return _trained(layers.Dense(5, "tanh"), Centred())


@row(
    "LoRA on a Dense layer",
    tolerance=1e-6,
    remark="Keras computes it in float32",
    slow=True,
)
def lora(folder: Path) -> Any:
    model = dense()
    model.layers[0].enable_lora(2)
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("a quantized model trained by LoRA", floatx="float32", tolerance=1e-4, slow=True)
def quantized(folder: Path) -> Any:
    model = dense()
    model.quantize("int8")
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return fit(model, *regression()), model


@row("a static batch size read in `call`")
def static_batch(folder: Path) -> Any:
    class Reshaped(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(ops.reshape(x, (ops.shape(x)[0], 2, 2)))[:, 0]

    model = Reshaped()
    model.compile("sgd", "mse")
    data = dataset(*regression(), batch=None).batch(BATCH, drop_remainder=True)
    return fit(model, data), model
