"""Cutting a batch of nested tensors along its first axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

__all__ = [
    "as_tensors",
    "batch_size",
    "bytes_of",
    "cut",
    "known_rows",
    "of_any_length",
    "rows",
    "sample",
    "spec_alike",
    "specs_of",
    "take",
    "traced_for",
    "with_any_rows",
    "with_shapes_of",
]


def _is_batched(value: Any) -> bool:
    return isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and (
        value.shape.rank is None or value.shape.rank > 0
    )


def as_tensors(data: Any) -> Any:
    """The batch with NumPy arrays and Python numbers made tensors, None kept.

    Keras hands over a generator's None as an ``Optional``, and takes it for None again.
    """

    def as_tensor(value: Any) -> Any:
        if value is None or isinstance(value, tf.experimental.Optional):
            return None
        if isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
            return value
        return tf.convert_to_tensor(value)

    return keras.tree.map_structure(as_tensor, data)


def _first(data: Any) -> Any:
    for value in keras.tree.flatten(data):
        if _is_batched(value):
            return value
    raise ValueError("the batch holds no tensor with a first axis to cut along")


def batch_size(data: Any) -> int:
    """Samples in an eager batch.

    Raises:
        ValueError: nothing in it has a first axis.
    """
    value = _first(data)
    if isinstance(value, tf.Tensor):
        return int(value.shape[0])  # known when eager; an operation would cost 0.1 ms
    return int(rows(data))


def specs_of(data: Any) -> Any:
    """The specs of batches like an eager one, of all sizes."""
    return with_any_rows(keras.tree.map_structure(tf.type_spec_from_value, data))


def spec_alike(spec: Any, data: Any) -> Any:
    """``spec`` of a data set's batches, as ``data``, one of them, shows it.

    None where they are unlike. A generator's None is an ``Optional`` in the spec.
    """

    def alike(part: Any, value: Any) -> Any:
        if value is None:
            return None
        # Not by Keras's comparison of structures: in Keras 3.3 it asks that leaves
        # are of one type.
        if not isinstance(part, tf.TypeSpec) or not part.is_compatible_with(value):
            raise TypeError(f"{value} is unlike {part}")
        return part

    try:
        return keras.tree.map_structure(alike, spec, data)
    except (TypeError, ValueError):
        return None


def with_any_rows(spec: Any) -> Any:
    """``spec`` of a batch, for batches of all sizes."""

    def relaxed(part: Any) -> Any:
        if not isinstance(part, tf.TensorSpec) or not part.shape.rank:
            return part
        return tf.TensorSpec([None, *part.shape[1:]], part.dtype, part.name)

    return keras.tree.map_structure(relaxed, spec)


def with_shapes_of(spec: Any, data: Any) -> Any:
    """``spec`` of a batch, with each dimension but the rows as ``data`` has it."""

    def known(part: Any, value: Any) -> Any:
        plain = isinstance(part, tf.TensorSpec) and isinstance(value, tf.Tensor)
        if not plain or not part.shape.rank or part.shape.rank != value.shape.rank:
            return part
        shape = [part.shape[0], *value.shape[1:]]
        return tf.TensorSpec(shape, part.dtype, part.name)

    return keras.tree.map_structure(known, spec, data)


def bytes_of(data: Any) -> int:
    """Bytes of an eager batch; what is no tensor has none."""
    held = 0
    for value in keras.tree.flatten(data):
        flat = value.flat_values if isinstance(value, tf.RaggedTensor) else value
        if isinstance(flat, tf.Tensor):
            held += int(flat.shape.num_elements()) * flat.dtype.size
    return held


def known_rows(data: Any) -> int | None:
    """Samples in a batch where its static shape tells them."""
    shape = _first(data).shape
    return None if shape.rank is None else shape[0]


def rows(data: Any) -> tf.Tensor:
    """Samples in a batch as an int32 scalar, also inside a graph."""
    value = _first(data)
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0]


def sample(data: Any, count: int) -> Any:
    """At most ``count`` samples of an eager batch, as different as they are easily had.

    Of a ragged tensor, or of whole numbers padded with zeros, the longest comes first
    and the shortest last: what depends on the length of others shows once these are
    parted.
    """
    samples = batch_size(data)
    longest, shortest = _extremes(data)
    others = [i for i in (longest, *range(samples)) if i != shortest]
    chosen = [*list(dict.fromkeys(others))[: max(0, count - 1)], shortest]
    rows = tf.constant(chosen)

    def pick(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            parts = [take(value, row, row + 1) for row in rows]
            return tf.sparse.concat(0, parts)
        return tf.gather(value, rows) if _is_batched(value) else value

    return keras.tree.map_structure(pick, data)


def _extremes(data: Any) -> tuple[int, int]:
    """The places of the longest and of the shortest row."""
    for value in keras.tree.flatten(data):
        if isinstance(value, tf.RaggedTensor):
            lengths = value.row_lengths()
        elif _is_batched(value) and value.dtype.is_integer and value.shape.rank == 2:
            lengths = tf.math.count_nonzero(value, axis=1)
        else:
            continue
        return int(tf.argmax(lengths)), int(tf.argmin(lengths))
    return 0, batch_size(data) - 1


def traced_for(function: Callable[..., Any], *data: Any) -> Callable[..., Any]:
    """The graph of ``function`` for ``data``, to be run a few times and forgotten.

    Called as a ``tf.function`` instead, each model's trial would count as retracing the
    one before, and TensorFlow would warn of it.
    """
    graph = tf.function(tf.autograph.experimental.do_not_convert(function))
    return graph.get_concrete_function(*data)  # type: ignore[no-any-return]


def of_any_length(data: Any) -> Any:
    """Placeholders like ``data``, for a graph that is only traced: any rows will do."""

    def placeholder(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not _is_batched(value):
            return value
        shape = value.shape if value.shape.rank is None else [None, *value.shape[1:]]
        return tf.compat.v1.placeholder(value.dtype, shape)

    return keras.tree.map_structure(placeholder, data)


def cut(data: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of every tensor in an eager batch."""
    return take(data, tf.constant(start), tf.constant(stop))


def take(data: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    """Samples ``start`` to ``stop`` (int32 scalars) of every tensor in ``data``."""

    def cut(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            begin = tf.concat(
                [[tf.cast(start, tf.int64)], tf.zeros_like(value.dense_shape[1:])], 0
            )
            size = tf.concat(
                [[tf.cast(stop - start, tf.int64)], value.dense_shape[1:]], 0
            )
            return tf.sparse.slice(value, begin, size)
        return value[start:stop] if _is_batched(value) else value

    return keras.tree.map_structure(cut, data)
