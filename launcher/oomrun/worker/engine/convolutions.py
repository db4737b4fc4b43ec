"""Which gradients of convolutions over volumes a graph has, and their buffers.

Covers: reading them from a step's graph, and how large Eigen takes the processor's last
cache to be. Does not cover: the rule (``oomrun.core.convolutions``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf
from tensorflow.python.grappler import cluster as clusters

from oomrun.core.convolutions import Buffer, buffer_of

__all__ = ["buffers_in"]

_INPUT = frozenset({"Conv3DBackpropInput", "Conv3DBackpropInputV2"})
_FILTER = frozenset({"Conv3DBackpropFilter", "Conv3DBackpropFilterV2"})


def buffers_in(graph: Any) -> tuple[Buffer, ...]:
    """Those that a step's operations take on a CPU, of those whose shapes are known.

    Args:
        graph: of the step.
    """
    found = []
    for operation in graph.get_operations():
        if operation.type in _INPUT and operation.outputs[0].consumers():
            found.append(_buffer(operation, operation.inputs[1], operation.outputs[0]))
        elif operation.type in _FILTER:
            found.append(_buffer(operation, operation.outputs[0], operation.inputs[0]))
    return tuple(buffer for buffer in found if buffer is not None)


def _buffer(operation: Any, kernel: tf.Tensor, given: tf.Tensor) -> Buffer | None:
    """Of the gradient for ``kernel``, or for the ``given`` input of the convolution."""
    made = operation.inputs[2]
    known = kernel.shape.is_fully_defined() and made.shape[1:].is_fully_defined()
    if not known or not given.shape[1:].is_fully_defined():
        return None
    *pixels, channels = made.shape[1:]
    return buffer_of(
        pixels=math.prod(pixels),
        channels=channels,
        input_elements=given.shape[1:].num_elements(),
        weights=kernel.shape.num_elements(),
        item_bytes=made.dtype.size,
        cache_bytes=_last_cache_bytes(),
    )


@functools.cache
def _last_cache_bytes() -> int:
    """Of the processor, as Eigen counts it: that of all of its parts, say."""
    cluster = clusters.Cluster()
    try:
        sizes = [device.properties.l3_cache_size for device in cluster.ListDevices()]
    finally:
        cluster.Shutdown()
    return max(sizes, default=0)
