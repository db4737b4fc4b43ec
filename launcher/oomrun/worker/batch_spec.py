"""The shapes and dtypes of a batch as plain data, to be kept in a checkpoint.

From them the variables of models that have none before their first call can be made
before the data is there.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from oomrun.worker.encoding import Unencodable, encode

__all__ = ["from_plain", "to_plain"]


def to_plain(data: Any) -> Any:
    """The nested structure of ``data`` with a text for each tensor.

    None where the structure is not of plain lists, tuples and dictionaries.
    """
    plain = keras.tree.map_structure(_text, data)
    try:
        encode(plain, {}, "batch")
    except Unencodable:
        return None
    return plain


def from_plain(plain: Any) -> Any:
    """The specs that ``to_plain`` was given the tensors of."""
    return keras.tree.map_structure(_spec, plain)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    kind = {tf.RaggedTensor: "ragged", tf.SparseTensor: "sparse"}.get(type(value))
    shape = ",".join(
        "?" if size is None or axis == 0 else str(size)
        for axis, size in enumerate(value.shape)
    )
    rank = value.ragged_rank if kind == "ragged" else 0
    return f"{kind or 'dense'} {value.dtype.name} {rank} {shape}"


def _spec(text: str | None) -> Any:
    if text is None:
        return None
    kind, dtype, rank, sizes = text.split(" ")
    shape = [None if size == "?" else int(size) for size in sizes.split(",") if size]
    if kind == "ragged":
        return tf.RaggedTensorSpec(shape, dtype, ragged_rank=int(rank))
    spec = tf.SparseTensorSpec if kind == "sparse" else tf.TensorSpec
    return spec(shape, dtype)
