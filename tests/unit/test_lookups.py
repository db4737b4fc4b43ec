"""Sparse gradients of parts, added up to what the whole batch has, row by row."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from oomrun.worker.engine import joining, lookups, models, rows, slicing
from oomrun.worker.engine.cutting import Cutter
from oomrun.worker.engine.gradients import GradientSum
from oomrun.worker.engine.lookups import Kind
from oomrun.worker.engine.loss_step import LossStep
from oomrun.worker.engine.objects import Objects
from oomrun.worker.engine.snapshot import Snapshot
from oomrun.worker.engine.step import StepFunction

pytestmark = pytest.mark.usefixtures("float64")

SAMPLES, ITEMS, TABLE = 11, 3, 12
Lookup = Callable[[Any, Any], Any]


def unique(ids: Any) -> Any:
    return tf.unique(tf.reshape(ids, [-1]))[0]


def spread(table: Any, places: Any, ids: Any) -> Any:
    """Rows of ``places``, each looked up once, brought to the items of samples."""
    dense = tf.scatter_nd(places[:, None], tf.gather(table, places), (TABLE, 2))
    return tf.gather(dense, ids)


def sparse(ids: Any) -> Any:
    return tf.sparse.from_dense(ids + 1)


def of_steps(ids: Any) -> Any:
    return tf.range(tf.shape(ids)[1])


_gathered = tf.function(spread)
_unique = tf.function(unique)


@tf.function  # type: ignore[untyped-decorator]
def _in_two(table: Any, ids: Any) -> Any:
    return _gathered(table, _unique(ids), ids)


ONCE: dict[str, Lookup] = {
    "unique": lambda t, x: spread(t, unique(x), x),
    "Keras's unique": lambda t, x: spread(
        t, keras.ops.unique(keras.ops.reshape(x, [-1])), x
    ),
    "unique, looked up by Keras": lambda t, x: tf.gather(
        keras.ops.take(t, unique(x), axis=0), tf.unique(tf.reshape(x, [-1]))[1]
    ),
    "unique, sorted": lambda t, x: spread(t, tf.sort(unique(x)), x),
    "unique, some of them": lambda t, x: spread(
        t, tf.boolean_mask(unique(x), unique(x) > 2), x
    ),
    "unique, shifted": lambda t, x: spread(t, 11 - (unique(x) + 1), 10 - x),
    "in a function": lambda t, x: _in_two(tf.convert_to_tensor(t), x),
    "summed by TensorFlow": lambda t, x: tf.nn.embedding_lookup_sparse(
        tf.convert_to_tensor(t), sparse(x), None, combiner="sum"
    ),
    "averaged by TensorFlow": lambda t, x: tf.nn.safe_embedding_lookup_sparse(
        tf.convert_to_tensor(t), sparse(x), None, combiner="mean"
    ),
    "steps of any number": lambda t, x: (
        tf.gather(t, of_steps(x))[None] * tf.cast(x, t.dtype)[..., None]
    ),
}
EACH: dict[str, Lookup] = {
    "items": tf.gather,
    "items in two columns": lambda t, x: tf.gather(t, x[:, 0]) * tf.gather(t, x[:, 1]),
    "steps of each sample": lambda t, x: tf.gather(
        t, tf.broadcast_to(of_steps(x)[None], tf.shape(x))
    ) * tf.cast(x, t.dtype)[..., None],
}  # fmt: skip
NEITHER: dict[str, Lookup] = {
    "each and once": lambda t, x: spread(t, unique(x), x) * tf.gather(t, x),
    "once, twice": lambda t, x: (
        spread(t, unique(x), x) + spread(t, unique(2 * x), 2 * x)
    ),
    "items and fixed ones": lambda t, x: tf.gather(t, x) + tf.gather(t, [1, 2, 3]),
    "items and steps": lambda t, x: tf.gather(t, x) + tf.gather(t, of_steps(x)),
    "hashed": lambda t, x: tf.gather(
        tf.gather(t, unique(x) % 4), tf.unique(tf.reshape(x, [-1]))[1]
    ),
}


class Looking(layers.Layer):  # type: ignore[misc]
    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        self.lookup = lookup

    def build(self, shape: Any) -> None:
        del shape
        self.table = self.add_weight(shape=(TABLE, 2))

    def call(self, ids: Any) -> Any:
        found = self.lookup(self.table.value, tf.cast(ids, tf.int32))
        return tf.reshape(found, [tf.shape(ids)[0], -1, 2])


def data() -> Any:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, size=(SAMPLES, ITEMS))
    return slicing.as_tensors((ids, rng.normal(size=(SAMPLES, 1))))


#: What the batches of ``data`` are of.
OF_ANY_LENGTH = (
    tf.TensorSpec((None, None), "int64"),
    tf.TensorSpec((None, 1), "float64"),
)


def model_of(lookup: Lookup, optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    x = keras.Input((None,), dtype="int32")
    h = layers.GlobalAveragePooling1D()(Looking(lookup)(x))
    model = keras.Model(x, layers.Dense(1)(h))
    model.compile(optimizer, "mse")
    model._symbolic_build(data_batch=models.unpack(data()))
    return model


def sparse_dense(lookup: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(1)])
    model.compile(optimizer, "mse")
    model._symbolic_build(data_batch=models.unpack(sparse_data()))
    return model


def sparse_data() -> Any:
    x, y = data()
    values = tf.one_hot(x, 5, dtype="float64") * [[[1.0], [2.0], [-3.0]]]
    return tf.sparse.from_dense(tf.reduce_sum(values, 1)), y


def traced(model: Any, batch: Any) -> list[tf.IndexedSlices]:
    found = Cutter(model, Snapshot(model)).scout(batch)
    gc.collect()  # the graph itself is gone
    return [g for g in found.applies[0].gradients if isinstance(g, tf.IndexedSlices)]


CASES = [
    (kind, name)
    for kind, named in ((Kind.EACH, EACH), (Kind.ONCE, ONCE), (Kind.NEITHER, NEITHER))
    for name in named
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_of_which_kind_lookups_are(kind: Kind, name: str) -> None:
    lookup = (EACH | ONCE | NEITHER)[name]
    (gradient,) = traced(model_of(lookup, "sgd"), data())
    assert lookups.kind(gradient) is kind


def test_what_chance_draws_is_neither_fixed_nor_distinct() -> None:
    def negatives(table: Any, ids: Any) -> Any:
        drawn = tf.random.uniform([4], 0, 5, tf.int32)
        both = tf.gather(table, tf.concat([ids[:, 0], drawn], 0))
        return both[:-4, None] * tf.reduce_sum(both[-4:])

    (gradient,) = traced(model_of(negatives, "sgd"), data())
    assert lookups.kind(gradient) is Kind.EACH


def values_of(model: Any) -> Iterator[Any]:
    for variable in (*model.trainable_variables, *model.optimizer.variables):
        yield variable.path, variable.numpy().astype("float64")


def assert_alike(found: Any, wanted: Any) -> None:
    for (name, a), (_, b) in zip(values_of(found), values_of(wanted), strict=True):
        error = np.abs(a - b).max(initial=0.0) / max(np.linalg.norm(b), 1e-3)
        assert error < 1e-10, (name, error)


QUICK = {"unique", "summed by TensorFlow", "unique, looked up by Keras"}


@pytest.mark.parametrize(
    ("name", "optimizer", "eager"),
    [
        ("sparse input", "adagrad", False),
        ("unique", "sgd", False),
        *((name, "adam", False) for name in ("sparse input", *EACH, *sorted(QUICK))),
        *(
            # Of which kind they are is told above, for all of them.
            pytest.param(name, "adam", False, marks=pytest.mark.slow)
            for name in sorted(ONCE.keys() - QUICK)
        ),
        *((name, "adam", True) for name in ("sparse input", "items", "unique")),
    ],
)
def test_a_cut_step_is_the_whole_one(name: str, optimizer: str, eager: bool) -> None:
    make, batch = model_of, data()
    if name == "sparse input":
        make, batch = sparse_dense, sparse_data()
    both = [make((EACH | ONCE).get(name, tf.gather), optimizer) for _ in range(2)]
    for model, size in zip(both, (SAMPLES, 3), strict=True):
        model.run_eagerly = eager
        function = StepFunction(model)
        assert function.cut(batch).possible, function.cut(batch).reason
        if make is model_of:
            function.trace_for(OF_ANY_LENGTH)
        for _ in range(2):
            function.run(batch, SAMPLES, size)
    assert_alike(both[1], both[0])


@pytest.mark.parametrize("name", NEITHER)
def test_a_table_looked_up_in_two_ways_is_cut_for_optimizers_that_add_rows_up(
    name: str,
) -> None:
    cut = StepFunction(model_of(NEITHER[name], "adam")).cut(data())
    assert cut.reason == lookups.TWO_WAYS
    both = [model_of(NEITHER[name], keras.optimizers.SGD(0.1, 0.9)) for _ in range(2)]
    for model, size in zip(both, (SAMPLES, 3), strict=True):
        function = StepFunction(model)
        assert function.cut(data()).possible
        function.run(data(), SAMPLES, size)
    assert_alike(both[1], both[0])


def test_only_plain_sgd_is_known_to_add_rows_up() -> None:
    gradients = traced(model_of(NEITHER["hashed"], "sgd"), data())
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    for optimizer in (adam(), sgd(clipnorm=1.0), sgd(global_clipnorm=1.0)):
        assert lookups.inexact(gradients, optimizer)
    assert not lookups.inexact(gradients, sgd(0.1, momentum=0.9))


def test_a_custom_loop_adds_up_what_is_looked_up_once() -> None:
    found = []
    for size in (SAMPLES, 3):
        model = model_of(ONCE["unique"], "adam")
        optimizer = model.optimizer

        def loss(batch: Any, model: Any = model) -> Any:
            return tf.square(model(batch[0]) - batch[1])[:, 0]

        objects = Objects([model], optimizer)
        step = LossStep(loss, optimizer, objects, undoable=True, spec=None)
        step.cut(data())
        step.run(data(), SAMPLES, size)
        found.append(model)
    assert_alike(found[1], found[0])


def example() -> tf.IndexedSlices:
    (gradient,) = traced(model_of(ONCE["unique"], "sgd"), data())
    return gradient


def slices(*places: int) -> tf.IndexedSlices:
    """Rows of ones, of twos, and so on."""
    values = np.repeat(np.arange(1.0, len(places) + 1)[:, None], 2, axis=1)
    indices = tf.constant(places, tf.int32)
    return tf.IndexedSlices(tf.constant(values), indices, tf.constant([TABLE, 2]))


def test_devices_and_workers_add_up_what_each_looked_up_once() -> None:
    given = [slices(4, 1, 7), slices(), slices(7, 4)]
    (found,) = joining.sums([example()], [[part] for part in given])
    assert found.indices.numpy().tolist() == [4, 1, 7]
    assert found.values.numpy()[:, 0].tolist() == [3.0, 2.0, 4.0]
    one = tf.concat([part.values for part in given], 0)
    places = tf.concat([part.indices for part in given], 0)
    again = rows.joined(example(), one, places, given[0].dense_shape)
    np.testing.assert_array_equal(again.values, found.values)


def test_of_rows_looked_up_once_no_more_are_kept_than_the_table_has() -> None:
    table = tf.Variable(tf.zeros((TABLE, 2), "float64"))
    total = GradientSum([example()], [table], tf.constant(100), tf.constant(1))
    state = total.zeros()
    for index in range(20):
        state = total.add(state, tf.constant(index), [slices(index % 3, 5)])
        assert len(state[0][1]) <= 4
    (found,) = total.result(state)
    assert found.indices.numpy().tolist() == [0, 5, 1, 2]
    assert found.values.numpy()[:, 0].tolist() == [7.0, 40.0, 7.0, 6.0]
