"""The buffers that gradients of convolutions over volumes take on a CPU.

Covers: how large they are, and from how many samples a pass on they are asked for. Does
not cover: convolutions over pictures, whose buffers have one size whatever the samples.

Source: ``Conv3DCustomBackpropInputOp`` and ``Conv3DCustomBackpropFilterOp`` in
tensorflow/core/kernels/conv_grad_ops_3d.cc: samples are multiplied as matrices, as many
at a time as make use of the whole last cache, however many there are; but where the
buffer for that is more than 25 times what the operation is given, it does without.
Measured for a last cache of 320 MiB: 80 MiB from 11 samples on, nothing for 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Buffer", "buffer_of", "bytes_at", "more_bytes"]

_MOST_OVERHEAD = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """What one operation asks for beside its tensors.

    Attributes:
        bytes: of the buffer.
        least_samples: of a pass, for fewer there is none.
    """

    bytes: int
    least_samples: int


def buffer_of(
    *,
    pixels: int,
    channels: int,
    input_elements: int,
    weights: int,
    item_bytes: int,
    cache_bytes: int,
) -> Buffer:
    """The buffer of the gradient of one convolution.

    Args:
        pixels: places of a sample's output, over all of its axes.
        channels: of the output.
        input_elements: of a sample.
        weights: elements of the kernel.
        item_bytes: of each element.
        cache_bytes: of the processor's last cache, as Eigen counts it.
    """
    columns = pixels * (weights // channels)
    unit = pixels * channels + weights + columns
    at_a_time = -(-(cache_bytes // item_bytes) // unit)
    elements = at_a_time * columns
    given_each = input_elements + pixels * channels
    least_given = elements // (_MOST_OVERHEAD + 1) + 1
    # One sample alone is multiplied in another way.
    least = max(2, -(-(least_given - weights) // given_each))
    return Buffer(bytes=elements * item_bytes, least_samples=least)


def bytes_at(buffers: Iterable[Buffer], samples: int, *, in_order: bool) -> int:
    """What a pass asks for.

    Args:
        buffers: of its operations.
        samples: of the pass.
        in_order: whether its operations run one at a time; otherwise two may.
    """
    found = sorted(b.bytes for b in buffers if samples >= b.least_samples)
    return sum(found[-1:] if in_order else found[-2:])


def more_bytes(
    buffers: Sequence[Buffer], samples: int, than: int, *, in_order: bool
) -> int:
    """How much more a pass asks for than one of ``than`` samples; 0 where it is less.

    Args:
        buffers: of its operations.
        samples: of the pass.
        than: of the other one.
        in_order: see ``bytes_at``.
    """
    then, there = (bytes_at(buffers, n, in_order=in_order) for n in (samples, than))
    return max(0, then - there)
