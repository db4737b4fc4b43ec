"""Plain data as JSON plus arrays, and back, to the last bit."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from oomrun import checkpoints
from oomrun.worker import checkpointing
from oomrun.worker.encoding import Arrays, Unencodable, decode, encode


def there_and_back(value: Any) -> Any:
    arrays: Arrays = {}
    encoded = json.loads(json.dumps(encode(value, arrays, "value"), allow_nan=False))
    return decode(encoded, arrays)


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and bits; a float's NaN has no sign in JSON."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (
            other.dtype, other.shape, other.tobytes(),
        )  # fmt: skip
    if isinstance(one, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b])
            for a, b in zip(one, other, strict=True)
        )
    return bool(one == other)


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
kinds = (
    npst.floating_dtypes(endianness="=", sizes=(16, 32, 64))
    | npst.integer_dtypes(endianness="=")
    | npst.unsigned_integer_dtypes(endianness="=")
    | npst.boolean_dtypes()
    | npst.complex_number_dtypes(endianness="=", sizes=(64, 128))
)
arrays = kinds.flatmap(
    lambda kind: npst.arrays(
        kind, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    )
)
values = st.recursive(
    hashable | st.floats() | st.binary() | arrays | kinds.flatmap(npst.from_dtype),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_there_and_back(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**100, -0.0, 5e-324, math.nan, -math.nan, math.inf, "\ud800", "", b"\x00\xff",
        {"__oomrun__": "array", "name": "x"}, {1: "int", "1": "text", False: "bool"},
        np.array(3.0, dtype=ml_dtypes.bfloat16), np.zeros((0, 3)), np.float32("nan"),
        np.arange(12).reshape(3, 4).T, np.arange(9)[::-2],
    ],
    ids=repr,
)  # fmt: skip
def test_special_values(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_tensors_come_back_as_arrays() -> None:
    assert same(there_and_back(tf.constant([1.5])), np.array([1.5], np.float32))


def test_what_comes_back_can_be_written_to() -> None:
    """A callback that counts in an array goes on counting in it."""
    packed = {"a": np.frombuffer(np.arange(3).tobytes(), dtype=np.int64)}
    found = decode(encode({"counts": packed["a"]}, packed, "x"), packed)
    found["counts"][0] = 7
    assert found["counts"].tolist() == [7, 1, 2]


Named = collections.namedtuple("Named", "a b")


@pytest.mark.parametrize(
    "value",
    [
        object(), len, lambda: 0, open, np.array([None]), np.array(["text"]),
        np.datetime64("2020"), np.zeros(2, ">f8"), collections.OrderedDict(a=1),
        [1, {"deep": (object(),)}], Named(1, 2), 1j,
        tf.Variable(1.0), np.zeros(1, dtype=[("a", "i4")]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_left_out(value: Any) -> None:
    with pytest.raises(Unencodable):
        encode(value, {}, "value")


@pytest.mark.parametrize(
    "value", [{}, {"__oomrun__": "code"}, {"__oomrun__": ["x"]}, {"a": 1}]
)
def test_what_was_not_encoded_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(value, {})


def test_the_fit_of_a_checkpoint_is_told_without_reading_all_of_it(
    tmp_path: Path,
) -> None:
    array = np.zeros(3)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    state = encode({"before": [array], "fit": 3, "after": array}, arrays, "state")
    files = checkpointing._pack(state, arrays)
    checkpoints.write(tmp_path, "step-1-0001", files)
    assert checkpointing.claimed_fit(tmp_path / "step-1-0001") == 3
    (tmp_path / "step-1-0001" / "arrays.bin").unlink()
    assert checkpointing.claimed_fit(tmp_path / "step-1-0001") == 3
    (tmp_path / "step-1-0001" / "state.json").write_text("[")
    assert checkpointing.claimed_fit(tmp_path / "step-1-0001") is None
    assert checkpointing.claimed_fit(tmp_path / "missing") is None
