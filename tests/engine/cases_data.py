"""Rows: what ``fit`` is given to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from engine.registry import row, section
from engine.samples import (
    BATCH,
    COUNT,
    array,
    compiled,
    dataset,
    fit,
    regression,
    two_data,
    two_outputs,
)

section("Data")


@row("NumPy arrays, shuffled by `fit`")
def arrays(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    return fit(model, *regression()), model


@row("tensors, in order (`shuffle=False`)", slow=True)
def tensors(folder: Path) -> Any:
    model = compiled()
    x, y = map(tf.constant, regression())
    return fit(model, x, y, shuffle=False), model


@row("`tf.data`, batched, with a partial last batch")
def dataset_batched(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    return fit(model, dataset(*regression())), model


@row("`tf.data`, `drop_remainder=True`", slow=True)
def dataset_whole_batches(folder: Path) -> Any:
    model = compiled(metrics=["mae"])
    data = dataset(*regression(), batch=None).batch(BATCH, drop_remainder=True)
    return fit(model, data), model


@row("`tf.data`, shuffled, mapped, batched, prefetched")
def dataset_pipeline(folder: Path) -> Any:
    model = compiled()
    data = (
        dataset(*regression(), batch=None).shuffle(COUNT).map(lambda x, y: (2 * x, y))
    )
    return fit(model, data.batch(BATCH).prefetch(2)), model


@row("`tf.data`, unbatched and batched again", slow=True)
def dataset_rebatched(folder: Path) -> Any:
    model = compiled()
    return fit(model, dataset(*regression(), batch=5).unbatch().batch(BATCH)), model


@row("`tf.data`, repeated, with `steps_per_epoch`")
def dataset_repeated(folder: Path) -> Any:
    model = compiled(metrics=["mae"])
    return fit(model, dataset(*regression()).repeat(), steps_per_epoch=4), model


@row("`tf.data`, length unknown")
def dataset_unknown_length(folder: Path) -> Any:
    model = compiled()
    data = dataset(*regression(), batch=None).filter(lambda x, y: x[0] > -1)
    return fit(model, data.batch(BATCH)), model


@row("generator with `steps_per_epoch`", slow=True)
def generator(folder: Path) -> Any:
    x, y = regression()

    def endless() -> Iterator[Any]:
        while True:
            for start in range(0, COUNT, BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    model = compiled()
    return fit(model, endless(), steps_per_epoch=3), model


@row("generator that ends, one epoch")
def generator_finite(folder: Path) -> Any:
    x, y = regression()
    starts = range(0, COUNT, BATCH)
    batches = ((x[s : s + BATCH], y[s : s + BATCH]) for s in starts)
    model = compiled()
    return fit(model, batches, epochs=1), model


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """The regression's batches, in another order each epoch."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.x, self.y = regression()
        self.first = 0

    def __len__(self) -> int:
        return -(-COUNT // BATCH)

    def __getitem__(self, index: int) -> Any:
        start = (index + self.first) % len(self) * BATCH
        return self.x[start : start + BATCH], self.y[start : start + BATCH]

    def on_epoch_end(self) -> None:
        self.first += 1


@row("`PyDataset`")
def py_dataset(folder: Path) -> Any:
    model = compiled(metrics=["mae"])
    return fit(model, Batches(), shuffle=False), model


@row("`PyDataset` with worker threads", slow=True)
def py_dataset_workers(folder: Path) -> Any:
    model = compiled()
    data = Batches(workers=2, max_queue_size=4)
    return fit(model, data, shuffle=False), model


@row("several inputs and outputs as dicts")
def dicts(folder: Path) -> Any:
    model = two_outputs()
    model.compile("adam", {"p": "mse", "q": "binary_crossentropy"})
    return fit(model, *two_data()), model


@row("several inputs and outputs as lists", slow=True)
def lists(folder: Path) -> Any:
    model = two_outputs(as_dict=False)
    model.compile("adam", ["mse", "binary_crossentropy"])
    return fit(model, *two_data(as_dict=False)), model


@row("dicts in `tf.data`", slow=True)
def dicts_dataset(folder: Path) -> Any:
    model = two_outputs()
    model.compile("sgd", "mse")
    return fit(model, dataset(*two_data())), model


class Bag(keras.Model):  # type: ignore[misc]
    """Means over ragged rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(9, 4), layers.Dense(2)

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor()
        return self.dense(keras.ops.mean(self.embedding(x), axis=1))


@row("ragged batches, made dense in the model")
def ragged(folder: Path) -> Any:
    # Rows of one length: padded, unequal ones would differ with the batch's longest.
    x = tf.ragged.constant(np.random.default_rng(0).integers(0, 9, (COUNT, 5)).tolist())
    model = Bag()
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, regression()[1]))
    return fit(model, data.ragged_batch(BATCH)), model


@row(
    "ragged batches of unequal rows, padded to the batch's longest in the model",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
    evaluate=None,
    slow=True,
)
def ragged_padded(folder: Path) -> Any:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 9, size=n).tolist() for n in [1, 5, 3] * 7 + [4]]
    model = Bag()
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant(rows), regression()[1])
    )
    return fit(model, data.ragged_batch(BATCH)), model


class RaggedMean(keras.Model):  # type: ignore[misc]
    """Means over each row's own length."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        means = tf.reduce_mean(x, axis=1) if isinstance(x, tf.RaggedTensor) else x
        return self.dense(tf.reshape(means, [-1, 1]))


@row("ragged batches of unequal rows")
def ragged_unequal(folder: Path) -> Any:
    rng = np.random.default_rng(0)
    rows = [list(rng.normal(size=n)) for n in rng.integers(1, 6, size=COUNT)]
    x = tf.ragged.constant(rows, dtype=keras.config.floatx())
    model = RaggedMean()
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, regression()[1]))
    return fit(model, data.ragged_batch(BATCH)), model


@row("variable-length batches (`padded_batch`)", slow=True)
def padded(folder: Path) -> Any:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size=COUNT)

    def sequences() -> Iterator[Any]:
        for index, length in enumerate(lengths):
            yield np.full((length, 3), index / COUNT), index % 2

    data = tf.data.Dataset.from_generator(
        sequences,
        output_signature=(
            tf.TensorSpec((None, 3), keras.config.floatx()),
            tf.TensorSpec((), "int64"),
        ),
    )
    model = keras.Sequential(
        [
            keras.Input((None, 3)),
            layers.Masking(),
            layers.SimpleRNN(4),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return fit(model, data.padded_batch(BATCH)), model


@row("sparse tensors")
def sparse(folder: Path) -> Any:
    x, y = regression()
    x[x < 0] = 0
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y))
    model = keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(2)])
    # It squares rows of gradients, of which the whole batch has one for each place.
    model.compile("adam", "mse")
    return fit(model, data.batch(BATCH)), model


@row("images as `uint8`, scaled in the model", slow=True)
def images(folder: Path) -> Any:
    x = (100 + 40 * array(COUNT, 6, 6, 1)).astype("uint8")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(2, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model.compile("adam", "mse")
    return fit(model, x, regression()[1]), model


@row("strings, with a `TextVectorization` in the pipeline", slow=True)
def strings(folder: Path) -> Any:
    texts = np.array(["a b c", "b c", "c a", "a"] * 5 + ["b", "c"])
    vectorize = layers.TextVectorization(output_sequence_length=3)
    vectorize.adapt(texts)
    data = dataset(texts, regression()[1]).map(lambda x, y: (vectorize(x), y))
    model = keras.Sequential(
        [layers.Embedding(6, 4), layers.Flatten(), layers.Dense(2)]
    )
    model.compile("adam", "mse")
    return fit(model, data), model


@row("inputs only: an autoencoder by `add_loss`")
def inputs_only(folder: Path) -> Any:
    x = keras.Input((4,))
    decoded = layers.Dense(4)(layers.Dense(2, "tanh")(x))
    model = keras.Model(x, Reconstruction()([x, decoded]))
    model.compile("adam")
    return fit(model, regression()[0]), model


class Reconstruction(layers.Layer):  # type: ignore[misc]
    """Adds the squared error, a mean, as a loss."""

    def call(self, both: Any) -> Any:
        x, decoded = both
        self.add_loss(keras.ops.mean(keras.ops.square(x - decoded)))
        return decoded


@row("a model built by its first batch")
def built_late(folder: Path) -> Any:
    model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(2)])
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("a batch size that the model fixes (`batch_shape`)")
def fixed_batch(folder: Path) -> Any:
    model = keras.Sequential([keras.Input(batch_shape=(BATCH, 4)), layers.Dense(2)])
    model.compile("sgd", "mse")
    x, y = regression(2 * BATCH)
    return fit(model, x, y), model
