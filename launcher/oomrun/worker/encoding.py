"""Python values as JSON plus arrays, and back, without pickle.

Covers: None, booleans, numbers (exactly; infinities and NaN too), strings, bytes,
lists, tuples, sets, dictionaries, NumPy arrays and scalars, tensors. Anything else is
``Unencodable``: the caller leaves it out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Arrays", "Unencodable", "decode", "encode"]

#: Arrays by name, beside the JSON that refers to them.
Arrays = dict[str, np.ndarray[Any, Any]]

_TAG = "__oomrun__"


class Unencodable(ValueError):
    """A value of a kind that is not kept."""


def encode(value: Any, arrays: Arrays, name: str) -> Any:
    """``value`` as JSON; arrays in it are put into ``arrays`` under ``name``.

    Raises:
        Unencodable: it holds something that is not plain data.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _array(np.asarray(value), arrays, name, scalar=True)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {_TAG: "float", "value": repr(value)}
    if type(value) is bytes:
        return {_TAG: "bytes", "value": value.hex()}
    if isinstance(value, np.ndarray):
        return _array(value, arrays, name, scalar=False)
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return _array(np.asarray(value.numpy()), arrays, name, scalar=False)
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(v, arrays, f"{name}/{i}") for i, v in enumerate(value)]
        if type(value) is list:
            return items
        if type(value) in (tuple, set, frozenset):
            return {_TAG: type(value).__name__, "items": items}
    if type(value) is dict:
        pairs = [
            [encode(k, arrays, f"{name}/k{i}"), encode(v, arrays, f"{name}/v{i}")]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_TAG: "dict", "pairs": pairs}
    raise Unencodable(f"{name}: {type(value).__name__}")


def _array(
    value: np.ndarray[Any, Any], arrays: Arrays, name: str, *, scalar: bool
) -> dict[str, Any]:
    try:
        kept = tf.as_dtype(value.dtype).as_numpy_dtype == value.dtype
    except TypeError:
        kept = False
    if not kept or value.dtype.hasobject:
        raise Unencodable(f"{name}: an array of {value.dtype}")
    arrays[name] = value
    return {_TAG: "scalar" if scalar else "array", "name": name}


def decode(value: Any, arrays: Arrays) -> Any:
    """The value that ``encode`` was given.

    Raises:
        ValueError: not something that ``encode`` made.
    """
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag == "float":
        return float(value["value"])
    if tag == "bytes":
        return bytes.fromhex(value["value"])
    if tag == "array":
        # A copy: what was read from a file is read-only, the value it was is not.
        return np.array(arrays[value["name"]])
    if tag == "scalar":
        return arrays[value["name"]][()]
    if tag == "dict":
        return {decode(k, arrays): decode(v, arrays) for k, v in value["pairs"]}
    sequences = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if tag in sequences:
        return sequences[tag](decode(item, arrays) for item in value["items"])
    raise ValueError(f"not an encoded value: {value!r}")
