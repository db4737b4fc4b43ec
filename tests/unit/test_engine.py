"""The engine against Keras's own step: whole bit for bit, split to 1e-10.

In process with TensorFlow, in float64. Batch-normalised models are left out of the
comparison of split steps on purpose: their statistics are those of a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from oomrun.worker import checkpointing
from oomrun.worker.engine import models, slicing, step
from oomrun.worker.engine.gradients import GradientSum
from oomrun.worker.engine.rows import Rows

BATCH = 6


pytestmark = pytest.mark.usefixtures("float64")


def batches(*shapes: tuple[int, ...], sizes: tuple[int, ...], seed: int = 0) -> Any:
    """For each size one list of arrays with these shapes."""
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=(size, *shape)) for shape in shapes] for size in sizes]


def built(make: Callable[[], Any], data: Any) -> Any:
    """A model as ``fit`` would have built it for ``data``, with fixed weights."""
    keras.utils.set_random_seed(1)
    model = make()
    model._symbolic_build(data_batch=models.unpack(slicing.as_tensors(data)))
    # Steps must not start at zero biases and equal scales.
    rng = np.random.default_rng(2)
    for weight in model.trainable_variables:
        weight.assign(weight + 0.1 * rng.normal(size=weight.shape))
    return model


def state(model: Any) -> list[np.ndarray[Any, Any]]:
    return [v.value.numpy().copy() for v in checkpointing.training_variables(model)]


def fed(batch: Any) -> Any:
    """The batch as ``fit`` gets it from ``tf.data``: its size is not in its shape."""
    tensors = slicing.as_tensors(batch)
    # tf.data takes a list for one tensor.
    tensors = tuple(tuple(t) if isinstance(t, list) else t for t in tensors)
    whole = tf.data.Dataset.from_tensors(tensors)
    return whole.unbatch().batch(slicing.batch_size(tensors))


def plain(make: Callable[[], Any], data: Any) -> tuple[Any, dict[str, float]]:
    """Keras's own steps over the batches, and its metrics after them."""
    model = built(make, data[0])
    function = model.make_train_function(force=True) or model.train_function
    for batch in data:
        logs = function(iter(fed(batch)))
    return model, {key: float(value) for key, value in logs.items()}


def ours(
    make: Callable[[], Any], data: Any, *micros: int
) -> Iterator[tuple[Any, dict[str, float]]]:
    """The engine's steps over the batches, each time with as many samples a pass.

    The same model, set back in between: its functions are traced once.
    """
    model = built(make, data[0])
    function = step.StepFunction(model)
    before = state(model)
    for micro in micros:
        variables = checkpointing.training_variables(model)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        for batch in data:
            tensors = slicing.as_tensors(batch)
            logs = function.run(tensors, slicing.batch_size(tensors), micro)
        yield model, {key: float(value) for key, value in logs.items()}


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    """All variables, each relative to its norm."""
    names = [v.path for v in checkpointing.training_variables(wanted)]
    for name, a, b in zip(names, state(found), state(wanted), strict=True):
        if a.dtype.kind in "iub":
            assert (a == b).all(), name
        else:
            error = np.abs(a - b).max(initial=0.0) / max(np.linalg.norm(b), 1e-3)
            assert error <= tolerance, (name, error)


# --- models ---------------------------------------------------------------------------


def dense(
    optimizer: Any = "sgd", loss: Any = "mse", model: Any = None, **compiled: Any
) -> Any:
    made = model or keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)]
    )
    if callable(optimizer):
        optimizer = optimizer()
    made.compile(optimizer, loss() if callable(loss) else loss, **compiled)
    return made


def cnn() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def tokens(kind: Any, reduction: str = "sum_over_batch_size", **given: Any) -> Any:
    """A tagger: masked in time, with a sparse gradient for its embedding."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            kind(3, return_sequences=True),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    model.compile("adam", loss, weighted_metrics=["accuracy"], **given)
    return model


class Positions(layers.Layer):  # type: ignore[misc]
    """Adds a row of a table for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(7, 4)

    def call(self, x: Any) -> Any:
        return x + self.table(tf.range(5))


def positions() -> Any:
    """Tokens and positions, as in a transformer; Adam squares row by row."""
    x = keras.Input((5,), dtype="int32")
    h = Positions()(layers.Embedding(7, 4)(x))
    model = keras.Model(x, layers.Dense(4)(layers.Dense(3, "tanh")(h)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def token_data(*sizes: int) -> Any:
    rng = np.random.default_rng(3)
    data = []
    for size in sizes:
        x = rng.integers(1, 7, size=(size, 5))
        x[np.arange(5) >= rng.integers(1, 6, size=(size, 1))] = 0
        data.append((x, rng.integers(0, 4, size=(size, 5))))
    return data


class Inner(layers.Layer):
    """Adds a loss of its own, a mean over the samples."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(x)) * 0.3)
        return x


class Unused(keras.Model):
    """Subclassed; one of its weights takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers.Dense(2), layers.Dense(3)

    def call(self, x: Any) -> Any:
        self.unused(x)
        return self.used(x)


def two_by_two(**compiled: Any) -> Any:
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joined = layers.Dense(4, "tanh")(layers.Concatenate()([a, b]))
    outputs = {
        "p": layers.Dense(2, name="p")(joined),
        "q": layers.Dense(1, activation="sigmoid", name="q")(joined),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        "adam",
        {"p": "mae", "q": keras.losses.BinaryCrossentropy()},
        loss_weights={"p": 0.3, "q": 2.0},
        metrics={"p": ["mse"], "q": ["accuracy"]},
        **compiled,
    )
    return model


def two_data(*sizes: int, weights: bool = False) -> Any:
    rng = np.random.default_rng(4)
    data: Any = []
    for n in sizes:
        x = {"a": rng.normal(size=(n, 3)), "b": rng.normal(size=(n, 2))}
        y = {"p": rng.normal(size=(n, 2)), "q": rng.integers(0, 2, size=(n, 1)) * 1.0}
        given = {"p": rng.uniform(size=n), "q": rng.uniform(size=n)}
        data.append((x, y, given) if weights else (x, y))
    return data


def regularised() -> Any:
    return dense(
        model=keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(
                    5, "tanh", kernel_regularizer="l2", activity_regularizer="l1"
                ),
                Inner(),
                layers.Dense(2, bias_regularizer=keras.regularizers.L1(0.1)),
            ]
        ),
        optimizer="adam",
    )


def frozen() -> Any:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)]
    )
    model.layers[0].trainable = False
    return dense(model=model, optimizer="adam")


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


def weighted(data: Any, *times: int) -> Any:
    rng = np.random.default_rng(5)
    return [(x, y, rng.uniform(0.0, 2.0, size=(len(x), *times))) for x, y in data]


FLAT = batches((4,), (2,), sizes=(BATCH, BATCH))
UNEQUAL = batches((4,), (2,), sizes=(BATCH, 4, BATCH))
IMAGES = [
    (x, np.eye(3)[np.arange(len(x)) % 3])
    for (x,) in batches((6, 6, 1), sizes=(BATCH, BATCH))
]
LOSS = keras.losses.MeanSquaredError
OPTIMIZER = keras.optimizers


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the logs that cannot be compared with Keras's."""

    make: Callable[[], Any]
    data: Any = field(default_factory=lambda: FLAT)


CASES = {
    "dense": Case(lambda: dense(metrics=["mae"])),
    "cnn": Case(cnn, IMAGES),
    "lstm": Case(lambda: tokens(layers.LSTM), token_data(BATCH, 4)),
    "gru, sum": Case(lambda: tokens(layers.GRU, "sum"), token_data(BATCH)),
    "rnn, mean_with_sample_weight": Case(
        lambda: tokens(layers.SimpleRNN, "mean_with_sample_weight"),
        token_data(BATCH, 4),
    ),
    "mask and sample weight": Case(
        lambda: tokens(layers.SimpleRNN), weighted(token_data(BATCH), 5)
    ),
    "mask and sample weight, mean_with_sample_weight": Case(
        lambda: tokens(layers.SimpleRNN, "mean_with_sample_weight"),
        weighted(token_data(BATCH), 5),
    ),
    # Of one size: see test_the_losses_of_each_output_are_weighted_by_samples.
    "two in, two out": Case(two_by_two, two_data(BATCH, BATCH)),
    "weights for each output": Case(
        lambda: two_by_two(weighted_metrics={"q": ["mse"]}),
        two_data(BATCH, BATCH, weights=True),
    ),
    "subclassed, a weight without gradient": Case(
        lambda: dense(model=Unused(), optimizer="adam")
    ),
    "regularised, add_loss": Case(regularised),
    "frozen": Case(frozen),
    "clipnorm": Case(lambda: dense(lambda: OPTIMIZER.SGD(0.1, clipnorm=0.05))),
    "clipvalue": Case(lambda: dense(lambda: OPTIMIZER.SGD(0.1, clipvalue=0.01))),
    "global_clipnorm": Case(
        lambda: dense(lambda: OPTIMIZER.Adam(0.1, global_clipnorm=0.05))
    ),
    "weight decay": Case(lambda: dense(lambda: OPTIMIZER.AdamW(0.1, 0.1))),
    "EMA": Case(
        lambda: dense(
            lambda: OPTIMIZER.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
        )
    ),
    "schedule, momentum": Case(
        lambda: dense(lambda: OPTIMIZER.SGD(schedule(), momentum=0.9, nesterov=True))
    ),
    "eager": Case(lambda: dense("adam", run_eagerly=True, metrics=["mae"])),
    "eager, masked": Case(
        lambda: tokens(layers.SimpleRNN, "mean", run_eagerly=True), token_data(BATCH)
    ),
    "xla": Case(lambda: dense("adam", jit_compile=True, metrics=["mae"])),
    "xla, masked": Case(
        lambda: tokens(layers.SimpleRNN, jit_compile=True), token_data(BATCH)
    ),
    "dense over images": Case(
        lambda: dense(
            model=keras.Sequential(
                [layers.Dense(3), layers.GlobalAveragePooling2D(), layers.Dense(2)]
            )
        ),
        [(x, y[:, :2]) for x, y in IMAGES],
    ),
    "positions": Case(positions, token_data(BATCH, 4)),
    "no y": Case(
        lambda: dense(loss=None, model=keras.Sequential([layers.Dense(2), Inner()])),
        [(x,) for x, _ in FLAT],
    ),
}
for _reduction in (
    "sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none",
):  # fmt: skip
    for _name, _data in (("", UNEQUAL), (", weighted", weighted(UNEQUAL))):
        CASES[f"{_reduction}{_name}"] = Case(
            lambda r=_reduction: dense("sgd", lambda: LOSS(reduction=r)), _data
        )


# Rows of the compatibility table that are not slow train with these, too, by `fit`.
ROWS_TOO = frozenset(
    {
        "cnn", "lstm", "mask and sample weight", "weights for each output", "frozen",
        "clipnorm", "EMA", "eager",
    }
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ROWS_TOO else ())
        for name in CASES
    ],
)
def test_a_step_whole_or_split_is_the_step_of_keras(name: str) -> None:
    case = CASES[name]
    wanted, wanted_logs = plain(case.make, case.data)
    # 4 leaves a smaller last pass, 1 is the last resort.
    runs = ours(case.make, case.data, BATCH, 4, 1)
    found, logs = next(runs)
    assert logs.keys() == wanted_logs.keys()
    for variable, a, b in zip(
        checkpointing.training_variables(wanted), state(found), state(wanted),
        strict=True,
    ):  # fmt: skip
        assert a.tobytes() == b.tobytes(), variable.path
    assert logs == wanted_logs
    for found, logs in runs:
        assert_close(found, wanted)
        assert logs == pytest.approx(wanted_logs, rel=1e-10, abs=1e-12)


def test_the_losses_of_each_output_are_averaged_over_batches_as_by_keras() -> None:
    """Not over samples, other than the total loss: cut or not, as Keras counts them."""
    data = two_data(6, 2)
    _, wanted = plain(two_by_two, data)
    for _, logs in ours(two_by_two, data, 6, 4):
        assert logs == pytest.approx(wanted, rel=1e-10)
    model = built(two_by_two, data[0])
    means = []
    for x, y in data:
        p = model(slicing.as_tensors(x))["p"]
        means.append(float(np.mean(keras.losses.mean_absolute_error(y["p"], p))))
        step.StepFunction(model).run(slicing.as_tensors((x, y)), len(y["p"]), 4)
    assert wanted["p_loss"] == pytest.approx(np.mean(means), rel=1e-6)


def masked_two() -> Any:
    """Two masked outputs: the divisors are found in a pass ahead of the real one."""
    x = keras.Input((5,), dtype="int32")
    h = layers.SimpleRNN(3, return_sequences=True)(
        layers.Embedding(7, 4, mask_zero=True)(x)
    )
    model = keras.Model(x, [layers.Dense(1, name="p")(h), layers.Dense(2, name="q")(h)])
    model.compile("sgd", ["mse", "mae"])
    return model


def test_the_pass_that_finds_divisors_counts_nothing() -> None:
    rng = np.random.default_rng(0)
    data = [
        (x, [rng.normal(size=(len(x), 5, 1)), rng.normal(size=(len(x), 5, 2))])
        for x, _ in token_data(BATCH, BATCH)
    ]
    wanted, wanted_logs = plain(masked_two, data)
    ((found, logs),) = ours(masked_two, data, 2)
    assert_close(found, wanted)
    assert logs == pytest.approx(wanted_logs, rel=1e-10)


def test_mixed_precision_scales_and_skips_as_keras_does() -> None:
    keras.config.set_dtype_policy("mixed_float16")

    def make() -> Any:
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return dense(
            lambda: keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
        )

    wanted, _ = plain(make, FLAT)
    runs = ours(make, FLAT, BATCH, 2)
    whole, _ = next(runs)
    for a, b in zip(state(whole), state(wanted), strict=True):
        assert a.tobytes() == b.tobytes()
    split, _ = next(runs)
    assert int(split.optimizer.iterations) == int(wanted.optimizer.iterations) == 2
    assert_close(split, wanted, tolerance=5e-3)
    assert all(np.isfinite(array).all() for array in state(split))
    # A step whose scaled gradients overflow changes the scale and nothing else.
    bad = [[x * 1e6, y * 1e6] for x, y in FLAT[:1]]
    wanted, _ = plain(make, bad)
    ((split, _),) = ours(make, bad, 2)
    for a, b in zip(state(split), state(wanted), strict=True):
        assert np.array_equal(a, b, equal_nan=True) or "loss" in str(b)
    assert float(split.optimizer.dynamic_scale) == 2.0**7


def test_another_micro_batch_is_not_traced_again() -> None:
    traces = 0

    class Counted(layers.Layer):
        def call(self, x: Any) -> Any:
            nonlocal traces
            traces += 1
            return x

    def make() -> Any:
        return dense(
            model=keras.Sequential([keras.Input((4,)), Counted(), layers.Dense(2)])
        )

    data = batches((4,), (2,), sizes=(16,))
    model = built(make, data[0])
    function = step.StepFunction(model)
    tensors = slicing.as_tensors(data[0])
    function.run(tensors, 16, 8)
    after_first = traces
    for micro in (7, 4, 3, 2, 1):
        function.run(tensors, 16, micro)
    assert traces == after_first
    # Batches of other sizes: once more, as in Keras, and then never again.
    for size in (11, 9, 14):
        other = slicing.as_tensors(batches((4,), (2,), sizes=(size,))[0])
        function.run(other, size, 5)
        after_first = after_first if size != 11 else traces
    assert traces == after_first


def test_ragged_and_sparse_batches_are_cut() -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [0, 3]])
    data = (ragged, sparse, None, tf.constant(1.0))
    assert slicing.batch_size(data) == 4
    start, stop = tf.constant(1), tf.constant(4)
    found = slicing.take(data, start, stop)
    assert found[0].to_list() == [[2, 3], [], [4]]
    assert tf.sparse.to_dense(found[1]).numpy().tolist() == [[2, 0], [0, 0], [0, 3]]
    assert (found[2], float(found[3])) == (None, 1.0)
    with pytest.raises(ValueError, match="no tensor"):
        slicing.batch_size((tf.constant(1.0),))


@pytest.mark.parametrize("places", [[[0, 2], [2, 1]], [[0, 2], [0, 2]]])
def test_rows_of_a_table_are_added_up_where_all_parts_have_the_same(
    places: list[list[int]],
) -> None:
    parts = [
        tf.IndexedSlices(tf.constant([[1.0], [2.0]]) * scale, tf.constant(indices))
        for scale, indices in zip((1.0, 10.0), places, strict=True)
    ]
    table = tf.Variable(tf.zeros((3, 1)))
    total = GradientSum(parts[:1], [table], tf.constant(2), tf.constant(1))
    state = total.zeros()
    for index, part in enumerate(parts):
        state = total.add(state, tf.constant(index), [part])
    (found,) = total.result(state)
    wanted = tf.add_n([tf.convert_to_tensor(_dense(part)) for part in parts])
    np.testing.assert_array_equal(_dense(found), wanted)
    assert len(found.indices) == (2 if places[0] == places[1] else 4)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize(
    ("samples", "micro", "rows"),
    [
        (10, 5, [15, 15]),  # three a sample
        (11, 5, [15, 15, 3]),
        (11, 5, [4, 0, 9]),  # as many as there happen to be
        (12, 4, [0, 0, 7]),
        (12, 4, [9, 1, 0]),
        (7, 8, [7]),
        (0, 8, []),  # an empty share
    ],
)
def test_rows_of_any_number_are_those_of_the_whole_batch_in_order(
    samples: int, micro: int, rows: list[int], in_graph: bool
) -> None:
    values = tf.reshape(tf.range(2.0 * sum(rows)), [-1, 2])
    places = tf.range(sum(rows), dtype=tf.int64) % 3
    ends = [0, *itertools.accumulate(rows)]

    def gathered(samples: tf.Tensor, micro: tf.Tensor) -> Any:
        example = tf.IndexedSlices(
            tf.raw_ops.PlaceholderWithDefault(input=values, shape=[None, 2]),
            tf.raw_ops.PlaceholderWithDefault(input=places, shape=[None]),
        )
        whole = Rows(samples, micro)
        state = whole.begin(example)
        for index, (begin, end) in enumerate(itertools.pairwise(ends)):
            part = tf.IndexedSlices(example.values[begin:end], places[begin:end])
            state = whole.add(state, tf.constant(index), part)
        return whole.result(state)

    run = tf.function(gathered) if in_graph else gathered
    found, indices = run(tf.constant(samples), tf.constant(micro))
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(indices, places)
    assert indices.dtype == tf.int64


def _dense(slices: tf.IndexedSlices) -> tf.Tensor:
    return tf.scatter_nd(slices.indices[:, None], slices.values, (3, 1))


class OwnStep(keras.Model):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_what_cannot_be_taken_over_is_left_alone() -> None:
    x = keras.Input((2,))
    model = OwnStep(x, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    assert models.cannot_step(model) == ""
    assert models.cannot_step(dense()) == ""
    model.train_step = tf.function(model.train_step)
    assert "is a tf.function of its own" in models.cannot_step(model)
    bare = keras.Sequential([layers.Dense(1)])
    bare.compile(optimizer=None, loss="mse")
    assert "keeps no optimizer" in models.cannot_step(bare)
