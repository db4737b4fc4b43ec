"""Places for batches of the data in the pool of a CPU device with a limit.

TensorFlow's allocator gives a batch the smallest free piece that is large enough, and
all of it unless that is twice as large: measured, batches of 12 MiB had 12 each in the
first epoch, and 12 and 22 in all others, of 110 MiB. And two that lie side by side are
one piece when both are let go. So before the first batch is read, places of exactly the
size of one are made, and what keeps them apart: some hundred bytes behind each.

Source of what is relied on: ``BFCAllocator::FindChunkPtr`` in xla/tsl/framework.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["LARGE", "keep_apart"]

#: Bytes; smaller tensors find room among others.
LARGE = 2**18
_GRAIN = 256  # as the allocator counts
# Sizes of what keeps places apart, and how many free pieces of each may be elsewhere.
_KEEPERS = {256: 256, 2**12: 256, 2**15: 64, 2**18: 16}


def keep_apart(spec: Any, rows: int, batches: int, free_bytes: int) -> list[Any]:
    """Makes places.

    Args:
        spec: of a batch.
        rows: of one.
        batches: that are there at once.
        free_bytes: of the pool. Where that is too little, nothing is made: TensorFlow
            would wait for ten seconds.

    Returns:
        What keeps them apart, for as long as it is held.
    """
    sizes = [_bytes(leaf, rows) for leaf in tf.nest.flatten(spec)]
    sizes = [size for size in sizes if size >= LARGE]
    keepers = sum(size * tries for size, tries in _KEEPERS.items())
    if batches * sum(sizes) + keepers > free_bytes:
        return []
    made: list[Any] = []
    apart: list[Any] = []
    try:
        for size in sizes * batches:
            made.append(_empty(size))
            apart += _behind(made[-1])
    except tf.errors.ResourceExhaustedError:
        return []  # what is free lies in pieces
    return apart


def _bytes(leaf: Any, rows: int) -> int:
    """Of a batch's tensor, as the allocator counts; 0 where it is not known."""
    if not isinstance(leaf, tf.TensorSpec) or not leaf.dtype.is_numpy_compatible:
        return 0
    if not leaf.shape.rank or None in leaf.shape[1:]:
        return 0
    size: int = rows * math.prod(leaf.shape[1:]) * leaf.dtype.size
    return -(-size // _GRAIN) * _GRAIN


def _behind(place: Any) -> list[Any]:
    """A tensor right behind another one; empty if none could be had there."""
    end = _address(place) + int(place.shape[0])
    held: list[Any] = []  # so that the next one lies elsewhere
    for size, tries in _KEEPERS.items():
        for _ in range(tries):
            tensor = _empty(size)
            if _address(tensor) == end:
                return [tensor]
            held.append(tensor)
    return []


def _empty(size: int) -> Any:
    return tf.raw_ops.Empty(shape=[size], dtype=tf.uint8, init=False)


def _address(tensor: Any) -> int:
    view = np.frombuffer(memoryview(tensor), np.uint8)
    return int(view.__array_interface__["data"][0])
