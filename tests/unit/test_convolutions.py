"""Buffers of convolutions over volumes, by TensorFlow's rule."""

from __future__ import annotations

from typing import Any

import pytest

from oomrun.core.convolutions import Buffer, buffer_of, bytes_at

MIB = 2**20
#: Measured with TensorFlow 2.21, where Eigen takes the last cache to be of 320 MiB.
POINTS: dict[str, Any] = {
    "pixels": 12 * 20 * 20, "channels": 12, "input_elements": 12 * 20 * 20 * 4,
    "weights": 4 * 12, "item_bytes": 4, "cache_bytes": 320 * MIB,
}  # fmt: skip
EDGES: dict[str, Any] = {
    **POINTS, "channels": 4, "input_elements": 12 * 20 * 20, "weights": 27 * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("convolution", "mib", "least"), [(POINTS, 80, 11), (EDGES, 278.8, 118)]
)
def test_buffers_are_as_measured(
    convolution: dict[str, Any], mib: float, least: int
) -> None:
    found = buffer_of(**convolution)
    assert round(found.bytes / MIB, 1) == mib
    assert found.least_samples == least


def test_a_processor_whose_caches_are_not_known_has_none() -> None:
    found = buffer_of(**{**POINTS, "cache_bytes": 0})
    assert found == Buffer(bytes=0, least_samples=2)


def test_one_sample_alone_has_none() -> None:
    found = buffer_of(**{**POINTS, "cache_bytes": 2 * MIB})
    assert found.least_samples == 2
    assert bytes_at([found], 1, in_order=True) == 0


def test_in_order_one_is_held_at_a_time_and_otherwise_two_may_be() -> None:
    buffers = [
        Buffer(bytes=count * MIB, least_samples=least)
        for count, least in ((5, 4), (9, 8), (7, 8))
    ]
    assert [
        bytes_at(buffers, samples, in_order=True) // MIB for samples in (3, 4, 7, 8)
    ] == [0, 5, 5, 9]
    assert bytes_at(buffers, 8, in_order=False) == 16 * MIB
