"""The pool of a CPU device with a limit, as one piece of memory.

TensorFlow's allocator takes the memory of such a device from the system in regions,
each twice as large as the one before, and nothing that it holds may lie across two of
them. Measured at a limit of 200 MiB: with 25 MiB in use, a tensor of 80 MiB ran out of
memory. A first region of the whole limit leaves no such borders. It is asked for
without being written to, so that the system gives only what is used later.

Source of what is relied on: ``BFCAllocator::Extend`` in xla/tsl/framework, which
doubles a region from 2 MiB until the allocation fits, and takes what is left of the
limit where that is less.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["gather_on_first_use", "limit_bytes"]

_MIB = 2**20
_FIRST_REGION = 2 * _MIB
#: What TensorFlow may have taken by then, for itself.
_TAKEN = 4 * _MIB


def limit_bytes() -> int | None:
    """The limit of this process's CPU device as TensorFlow was told it; None: none."""
    uses_bfc = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")
    limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    return int(limit) * _MIB if uses_bfc and limit.isdecimal() else None


def gather_on_first_use() -> None:
    """Has the pool made in one piece as soon as TensorFlow sets its devices up.

    That is with the first operation: setting them up here would take from the script
    what it may only do before, such as choosing its number of threads. Does nothing
    for a process whose CPU device has no limit.
    """
    limit = limit_bytes()
    if limit is None:
        return
    owner: Any = context.Context
    original = owner.ensure_initialized

    def ensure_initialized(self: Any) -> None:
        original(self)
        # Once, and first of all: what follows is an operation, and comes by here.
        if owner.ensure_initialized is ensure_initialized:
            owner.ensure_initialized = original
            _gather(limit)

    owner.ensure_initialized = ensure_initialized


def _gather(limit: int) -> None:
    """Takes a region of nearly ``limit`` bytes, before anything else does."""
    half = _FIRST_REGION
    while 2 * half < limit - _TAKEN:
        half *= 2
    if half + 1 > limit - _TAKEN:
        return  # so small that its regions are as good
    # Where it is more than there is, training goes on in smaller regions.
    with tf.device("CPU:0"), contextlib.suppress(tf.errors.ResourceExhaustedError):
        # The least that the region below the limit's next power of two cannot hold.
        # In large numbers: a shape has 32 bits.
        tf.raw_ops.Empty(shape=[half // 16 + 1], dtype=tf.complex128, init=False)
    tf.config.experimental.reset_memory_stats("CPU:0")
