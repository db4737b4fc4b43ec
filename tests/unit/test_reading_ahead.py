"""Whether a step has room beside the next batch, which was read before it began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomrun.core.allocations import FREE, HELD, Recording
from oomrun.core.reading_ahead import is_crowded

KIB = 1024


def step(*moves: int, requests: tuple[int, ...], free: int = 0) -> Recording:
    """Above 10 KiB that are in use all along."""
    layout = ((free * KIB, FREE), (10 * KIB, HELD)) if free else ((10 * KIB, HELD),)
    lengths = tuple(n * KIB for n in requests)
    return Recording(size=1, layout=layout, early=0, requests=lengths, moves=moves)


# A small tensor comes and goes, then a large one.
PLAIN = step(0, ~0, 1, ~1, requests=(20, 80))
# The same, with a hole below that is just right for a batch.
HOLE = step(0, ~0, 1, ~1, requests=(20, 80), free=10)
# What is free lies in two pieces, and the batch is given the smaller one.
TWO = replace(PLAIN, layout=((85 * KIB, FREE), (10 * KIB, HELD)))


@pytest.mark.parametrize(
    ("recording", "pool_kib", "batch_kib", "crowded"),
    [
        (PLAIN, 100, 10, False),  # 10 in use, 10 for the batch, 80 for the large one
        (PLAIN, 99, 10, True),
        (PLAIN, 99, 9, False),
        (PLAIN, 99, 0, False),  # nothing is read into it
        (PLAIN, 80, 10, True),  # no room for the step itself
        (HOLE, 100, 10, False),  # the hole is the batch's
        (HOLE, 100, 11, True),
        (TWO, 100, 5, False),  # that of 5
        (TWO, 100, 6, True),  # that of 85, which the large one needs
        (TWO, 185, 6, False),
    ],
)
def test_it_lies_in_the_best_piece_that_is_free_then(
    recording: Recording, pool_kib: int, batch_kib: int, crowded: bool
) -> None:
    assert is_crowded(recording, pool_kib * KIB, batch_kib * KIB) == crowded
