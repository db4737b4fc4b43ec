"""Values of variables that are held while training goes on: they stay as they were.

Covers: Keras's steps with dense and sparse gradients, statistics, averages of weights,
XLA; TensorFlow's operations that write in place; nothing copied at reading.
Does not cover: copies made at once (``test_host_copies.py``), whole checkpoints
(``tests/unit/test_checkpoint_behind.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker.engine import keeping, reading

ROWS = np.random.default_rng(0).normal(size=(32, 24)).astype("float32")
WORDS = np.random.default_rng(1).integers(0, 50, (32, 6))


def dense(optimizer: Any, **more: Any) -> tuple[Any, Any]:
    model = keras.Sequential(
        [
            keras.Input((24,)),
            keras.layers.Dense(300, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(24),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], **more)
    return model, ROWS


def embedding(optimizer: Any, **more: Any) -> tuple[Any, Any]:
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            # Large enough that a copy at reading would be noticed.
            keras.layers.Embedding(30_000, 16),
            keras.layers.Flatten(),
            keras.layers.Dense(24),
        ]
    )
    model.compile(optimizer, "mse", **more)
    return model, WORDS


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "adam": lambda: dense("adam"),
    "momentum": lambda: dense(keras.optimizers.SGD(0.1, momentum=0.9)),
    "ema": lambda: dense(keras.optimizers.Adam(use_ema=True, ema_momentum=0.9)),
    "accumulating": lambda: dense(keras.optimizers.Adam(gradient_accumulation_steps=2)),
    "xla": lambda: dense("adam", jit_compile=True),
    "eager": lambda: dense("adam", run_eagerly=True),
    "rows of a table": lambda: embedding("adam"),
    "rows of a table, sgd": lambda: embedding("sgd"),
    "rows of a table, xla": lambda: embedding("adagrad", jit_compile=True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_what_is_held(case: str) -> None:
    model, x = CASES[case]()
    model.train_on_batch(x, ROWS)
    variables = keeping.variables_of(model)
    spare: list[Any] = []
    for _ in range(3):
        before = [np.array(v.value.numpy()) for v in variables]
        held = keeping.held(variables)
        model.train_on_batch(x, ROWS)
        model.train_on_batch(x, ROWS)
        spare = keeping.copied(held, spare)
        assert held == []
        same(spare, before)
        after = [np.asarray(v.value.numpy()) for v in variables]
        assert sum(map(np.array_equal, after, before)) < len(variables) / 2


def same(found: list[Any], expected: list[Any]) -> None:
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in expected]
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


def in_place() -> dict[str, Callable[[list[tf.Variable]], Any]]:
    rows = tf.constant([1, 5, 7])

    def some() -> tf.Tensor:
        return tf.random.normal((3, 16))

    def whole() -> tf.Tensor:
        return tf.random.normal((20_000, 16))

    def fused(v: list[tf.Variable]) -> None:
        tf.raw_ops.ResourceApplyAdam(
            var=v[0].handle, m=v[1].handle, v=v[2].handle, beta1_power=0.9,
            beta2_power=0.9, lr=0.1, beta1=0.9, beta2=0.9, epsilon=1e-7, grad=whole(),
        )  # fmt: skip

    def fused_rows(v: list[tf.Variable]) -> None:
        tf.raw_ops.ResourceSparseApplyKerasMomentum(
            var=v[0].handle, accum=v[1].handle, lr=0.1, grad=some(), indices=rows,
            momentum=0.9,
        )  # fmt: skip

    def slice_of_one(v: list[tf.Variable]) -> None:
        v[0][3:6].assign(some())

    return {
        "assign_add": lambda v: v[0].assign_add(whole()),
        "assign_sub": lambda v: v[0].assign_sub(whole()),
        "assign": lambda v: v[0].assign(whole()),
        "rows": lambda v: v[0].scatter_update(tf.IndexedSlices(some(), rows)),
        "rows by index": lambda v: v[0].scatter_nd_add([[1], [2], [3]], some()),
        "slice": slice_of_one,
        "fused": fused,
        "fused rows": fused_rows,
    }


@pytest.mark.parametrize("first", ["nothing", "rows", "assign_add"])
@pytest.mark.parametrize("name", in_place())
def test_whatever_writes_in_place(name: str, first: str) -> None:
    write = in_place()
    variables = [tf.Variable(tf.random.normal((20_000, 16))) for _ in range(3)]
    if first != "nothing":
        # From its first update by rows on, TensorFlow holds a variable in another way.
        write[first](variables)
    for _ in range(2):
        before = [np.array(v.numpy()) for v in variables]
        held = reading.references(variables)
        write[name](variables)
        same([reading.as_array(t) for t in held], before)
        assert not np.array_equal(variables[0].numpy(), before[0])


def test_nothing_is_copied_by_reading() -> None:
    table = tf.Variable(tf.zeros((20_000, 16)))
    table.scatter_add(tf.IndexedSlices(tf.ones((1, 16)), [3]))
    small = tf.Variable(1.5, dtype="bfloat16")
    for _ in range(2):
        one = reading.references([table, small])
        other = [reading.reference(table), reading.reference(small)]
        same([reading.as_array(t) for t in one], [reading.as_array(t) for t in other])
        assert np.shares_memory(reading.as_array(one[0]), reading.as_array(other[0]))
        del one, other
        table.scatter_add(tf.IndexedSlices(tf.ones((1, 16)), [3]))


def test_many_at_once_in_their_order() -> None:
    values = [
        tf.Variable(3, dtype="int64"),
        tf.constant([1.0, 2.0]),
        tf.Variable([True, False]),
        tf.Variable(tf.zeros((0, 2), "float64")),
        tf.constant(7),
    ]
    same(
        [reading.as_array(t) for t in reading.references(values)],
        [np.asarray(v.numpy()) for v in values],
    )
    assert reading.references([]) == []
