"""Where the next batch comes to lie while a step runs, and whether later ones fit."""

from __future__ import annotations

import pytest

from oomrun.core.allocations import FREE, HELD, Recording, fits
from oomrun.core.reading_ahead import is_crowded, share_without_room

KIB = 1024


def step(*moves: int, requests: tuple[int, ...], free: int = 0) -> Recording:
    """Above 10 KiB that are in use all along."""
    layout = ((free * KIB, FREE), (10 * KIB, HELD)) if free else ((10 * KIB, HELD),)
    lengths = tuple(n * KIB for n in requests)
    return Recording(size=1, layout=layout, early=0, requests=lengths, moves=moves)


# A piece is not split where less would be left than was asked for: while the large
# tensor is there nothing is free, and no batch is read.
# A small tensor comes and goes, then a large one.
SPLIT = step(0, ~0, 1, ~1, requests=(20, 80))
# The same, with a hole below that is just right for a batch.
HOLE = step(0, ~0, 1, ~1, requests=(20, 80), free=10)
# And one that the small tensor takes first.
TAKEN = step(0, ~0, 1, ~1, requests=(9, 80), free=10)


@pytest.mark.parametrize(
    ("recording", "pool_kib", "batch_kib", "share"),
    [
        (SPLIT, 100, 10, 1 / 4),  # read beside the small one, it lies in the way
        (SPLIT, 110, 10, 1 / 4),
        (SPLIT, 120, 10, 0),  # room for the large one above both
        (SPLIT, 100, 1, 1 / 4),
        (HOLE, 110, 10, 0),
        (TAKEN, 110, 10, 0),
        (TAKEN, 109, 10, 1 / 5),
        (SPLIT, 90, 10, 1),  # no room for one batch more at all
        (SPLIT, 80, 10, 1),  # not even for the step
    ],
)
def test_the_share_of_bad_moments(
    recording: Recording, pool_kib: int, batch_kib: int, share: float
) -> None:
    found = share_without_room(recording, pool_kib * KIB, batch_kib * KIB)
    assert found == pytest.approx(share)
    assert fits(recording, pool_kib * KIB) or share == 1
    assert is_crowded(recording, pool_kib * KIB, batch_kib * KIB) == (share > 1 / 4)
    assert not is_crowded(recording, pool_kib * KIB, 0)  # nothing is read into it
