"""Values of variables, copied to the host while training waits.

Covers: every type and shape, reuse of memory, copies that stay as they were.
Does not cover: writing them (``tests/unit/test_checkpoint_faults.py``).
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker.engine import keeping, reading

SHAPES = [(), (0,), (1,), (7, 3), (3, 0, 2), (1_000_003,), (17, 70_001)]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"]


def variables(shapes: list[tuple[int, ...]], dtype: str) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        keras.Variable(random.integers(0, 2, shape), dtype=dtype, trainable=False)
        for shape in shapes
    ]


def same(copies: list[Any], values: list[Any]) -> None:
    assert len(copies) == len(values)
    for copy, value in zip(copies, values, strict=True):
        assert (copy.shape, copy.dtype) == (value.shape, value.dtype)
        assert copy.tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_that_a_variable_may_be(dtype: str) -> None:
    made = variables(SHAPES, dtype)
    same(keeping.host_copies(made), [np.asarray(v.numpy()) for v in made])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (1024, 512)])
def test_a_variable_of_keras_s_is_copied_as_one_of_tensorflow_s(
    dtype: str, shape: tuple[int, ...]
) -> None:
    given = keras.Variable(tf.ones(shape, dtype), dtype=dtype)
    wanted = np.asarray(given.numpy())
    for found in (
        keeping.host_copy(given),
        *keeping.host_copies([given]),
        *map(reading.as_array, reading.references([given])),
    ):
        assert (found.dtype, found.shape) == (wanted.dtype, shape)
        np.testing.assert_array_equal(found, wanted)


def test_a_copy_stays_as_it_was() -> None:
    """Also where the variable is written in place, whole or row by row."""
    made = variables(SHAPES[3:], "float32")
    table = variables([(1000, 64)], "float32")[0]
    # From its first update by rows on, TensorFlow holds a variable in another way.
    table.value.scatter_add(indexed([0], 1.0))
    made.append(table)
    before = [np.array(v.numpy()) for v in made]
    copies = keeping.host_copies(made)
    for variable in made:
        variable.assign_add(np.ones(variable.shape))
    table.value.scatter_add(indexed([3, 999], 5.0))
    same(copies, before)


def indexed(rows: list[int], value: float) -> Any:
    import tensorflow as tf

    return tf.IndexedSlices(tf.fill([len(rows), 64], value), tf.constant(rows))


def test_memory_is_used_again_where_it_fits() -> None:
    made = variables([(5, 4), (2_000_000,), (3,)], "float32")
    old = keeping.host_copies(made)
    other = [np.zeros((4, 5), "float32"), old[1], np.zeros(3, "float64")]
    for variable in made:
        variable.assign_add(np.ones(variable.shape))
    new = keeping.host_copies(made, other)
    same(new, [np.asarray(v.numpy()) for v in made])
    assert new[1] is old[1]
    assert new[0] is not other[0]
    assert new[2] is not other[2]
    # More or fewer than there were.
    same(keeping.host_copies(made[:2], new), [np.asarray(v.numpy()) for v in made[:2]])
    same(keeping.host_copies(made, new[:1]), [np.asarray(v.numpy()) for v in made])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_hold_every_byte_once(count: int) -> None:
    sizes = [0, 1, 7, 100, 3, 0, 12]
    values = [np.arange(size, dtype="uint8") for size in sizes]
    copies = [np.full(size, 255, "uint8") for size in sizes]
    parts = keeping._parts(list(zip(copies, values, strict=True)), count)
    assert len(parts) <= count
    lengths = [sum(to.size for to, _ in part) for part in parts]
    assert sum(lengths) == sum(sizes)
    assert max(lengths) <= -(-sum(sizes) // count)
    for part in parts:
        keeping._copy(part)
    same(copies, values)
