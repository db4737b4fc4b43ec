"""What a recorded step says of other sizes, and the allocator that it is played to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomrun.core import allocations
from oomrun.core.allocations import FREE, HELD, Recording
from oomrun.core.allocator import Pool, rounded
from oomrun.core.recorded import (
    AS_IT_HAPPENS,
    IN_ORDER,
    Recorded,
    rises_with_size,
)

KIB = 1024
# Weights of 96 KiB; of 13 samples a pass an input and two layers; a gradient. The peak
# is with the input, the second layer's output and the gradient.
STEP = Recording(
    size=13,
    layout=((96 * KIB, HELD), (13 * KIB, 0)),
    early=1,
    requests=(13 * KIB, 13 * 4 * KIB, 13 * 2 * KIB, 96 * KIB),
    moves=(1, 2, ~1, 3, ~0, ~3, ~2),
    telling=True,
)


@pytest.mark.parametrize(
    ("size", "counts"), [(0, 256), (1, 256), (256, 256), (257, 512), (1000, 1024)]
)
def test_requests_are_rounded_up(size: int, counts: int) -> None:
    assert rounded(size) == counts


def test_the_smallest_piece_that_is_large_enough_is_handed_out() -> None:
    pool = Pool(64 * KIB)
    first, second, _ = (pool.allocate(n * KIB) for n in (8, 20, 4))
    assert first == 0
    assert second is not None
    pool.free(first)
    assert pool.allocate(5 * KIB) == first  # not from what is left at the end
    assert pool.in_use == (8 + 20 + 4) * KIB  # whole: 8 is less than twice 5


def test_a_piece_of_twice_the_size_is_split() -> None:
    pool = Pool(64 * KIB)
    assert [pool.allocate(16 * KIB) for _ in range(4)] == [
        n * 16 * KIB for n in range(4)
    ]
    assert pool.allocate(1) is None
    assert pool.in_use == pool.peak == 64 * KIB


def test_free_neighbours_are_joined_on_both_sides() -> None:
    pool = Pool(48 * KIB)
    places = [pool.allocate(16 * KIB) for _ in range(3)]
    for place in (0, 2, 1):
        found = places[place]
        assert found is not None
        pool.free(found)
    assert pool.in_use == 0
    assert pool.allocate(48 * KIB) == 0


def test_a_hole_that_is_too_small_is_of_no_use() -> None:
    pool = Pool(48 * KIB)
    places = [pool.allocate(16 * KIB) for _ in range(3)]
    for place in (0, 2):
        found = places[place]
        assert found is not None
        pool.free(found)
    assert pool.allocate(17 * KIB) is None


@pytest.mark.parametrize(
    ("wanted", "rows", "lengths", "below", "size"),
    [
        (64, 256, (), 0.8, 61),
        (61, 256, (), 0.8, 61),
        (64, 256, (61 * 7,), 0.8, 59),
        (64, 256, (61 * 7, 59), 0.9, None),
        (4, 16, (), 0.0, None),
        (12, 48, (), 0.95, None),
        (12, 48, (), 0.8, 11),
        (13, 13, (26, 5), 1.0, None),
        (683, 2048, (), 0.9, 677),  # 2048 leaves 682 of 683
    ],
)
def test_a_telling_size_is_a_prime_that_divides_no_weight(
    wanted: int, rows: int, lengths: tuple[int, ...], below: float, size: int | None
) -> None:
    assert allocations.telling_size(wanted, rows, lengths, below) == size


def test_only_what_has_the_rows_of_a_pass_grows_with_it() -> None:
    then = allocations.at_size(STEP, 26)
    # What was there before, such as the data, is what it was.
    assert then.requests == (13 * KIB, 26 * 4 * KIB, 26 * 2 * KIB, 96 * KIB)
    assert then.layout == STEP.layout
    assert allocations.at_size(then, 26) == then


def test_the_most_that_was_asked_for_at_one_time() -> None:
    assert allocations.needed_bytes(STEP) == (96 + 13 + 13 * 2 + 96) * KIB
    later = allocations.at_size(STEP, 130)
    assert allocations.needed_bytes(later) == (96 + 13 + 130 * 6) * KIB


def test_the_least_pool_has_room_and_a_smaller_one_has_not() -> None:
    least = allocations.least_pool(STEP)
    assert allocations.fits(STEP, least)
    assert not allocations.fits(STEP, int(least * 0.98))
    assert least >= allocations.needed_bytes(STEP)
    peak = allocations.pool_peak(STEP, least)
    assert peak is not None
    assert allocations.needed_bytes(STEP) <= peak <= least


def test_what_lies_in_the_middle_of_what_is_free_is_in_the_way() -> None:
    def step(*layout: tuple[int, int]) -> Recording:
        moves, requests = (0, ~0), (40 * KIB,)
        return Recording(size=7, layout=layout, early=0, requests=requests, moves=moves)

    below = step((24 * KIB, HELD))
    between = step((16 * KIB, HELD), (20 * KIB, FREE), (8 * KIB, HELD))
    assert allocations.fits(below, 64 * KIB)
    assert not allocations.fits(between, 64 * KIB)
    assert allocations.fits(between, 84 * KIB)
    # In a pool that is smaller than what it lay in, there is less in between.
    high = step((16 * KIB, HELD), (60 * KIB, FREE), (8 * KIB, HELD))
    assert allocations.fits(high, 66 * KIB)
    assert not allocations.fits(high, 60 * KIB)
    assert allocations.needed_bytes(below) == allocations.needed_bytes(between)


def test_what_is_held_beside_takes_room() -> None:
    least = allocations.least_pool(STEP)
    more = allocations.with_more(STEP, 32 * KIB)
    assert allocations.least_pool(more) >= least + 30 * KIB
    assert allocations.with_more(STEP, 0) == STEP


def test_a_pool_too_small_for_what_is_held_has_no_room() -> None:
    assert not allocations.fits(STEP, 64 * KIB)


RECORDED = Recorded(pools={13: allocations.least_pool(STEP)}, best=STEP, spread=0.02)


def test_a_size_that_was_not_tried_is_predicted_from_the_one_that_was() -> None:
    likely, high = RECORDED.predict(130) or (0, 0)
    assert allocations.needed_bytes(allocations.at_size(STEP, 130)) <= likely <= high
    assert high < 1.2 * likely


@pytest.mark.parametrize("size", [5, 13, 40, 130])
def test_what_is_said_to_fit_has_its_upper_end_in_the_budget(size: int) -> None:
    _, high = RECORDED.predict(size) or (0, 0)
    assert RECORDED.fits(size, int(high * 1.02))
    assert not RECORDED.fits(size, int(high * 0.95))


@pytest.mark.parametrize(
    ("spread", "in_parts", "size", "more"),
    [
        (IN_ORDER, True, 64, False),
        (IN_ORDER, True, 130, True),  # whole, and recorded in parts
        (IN_ORDER, False, 130, False),
        (IN_ORDER, False, 64, False),
        (AS_IT_HAPPENS, True, 64, False),
        (AS_IT_HAPPENS, True, 130, True),
        (AS_IT_HAPPENS, False, 64, True),
        (AS_IT_HAPPENS, False, 130, False),
        (AS_IT_HAPPENS, False, 13, False),  # this one ran
    ],
)
def test_what_was_recorded_in_another_form_is_less_sure(
    spread: float, in_parts: bool, size: int, more: bool
) -> None:
    same = replace(RECORDED, spread=spread)
    likely, high = same.predict(size) or (0, 0)
    known = replace(same, rows=130, in_parts=in_parts)
    again, higher = known.predict(size) or (0, 0)
    assert again == likely
    assert (higher > high) == more
    assert known.fits(size, int(higher * 1.02))
    assert not known.fits(size, int(higher * 0.95))


def test_without_a_recording_only_what_ran_is_known() -> None:
    known = Recorded(pools={13: 1000})
    assert known.predict(13) == (1000, 1080)
    assert known.predict(14) is None
    assert known.fits(13, 1080)
    assert known.fits(13, 1079) is False
    assert known.fits(14, 1040) is None
    assert known.handed_out(13) is None


def test_room_is_kept_for_a_batch_that_is_read_meanwhile() -> None:
    least = RECORDED.pools[13]
    budget = int(1.02 * least) + 1
    assert RECORDED.fits(13, budget)
    tight = replace(RECORDED, pool_bytes=int(least / 0.99) + 1)
    assert tight.fits(13, budget)
    assert not replace(tight, batch_bytes=64 * KIB).fits(13, budget)
    roomy = replace(tight, pool_bytes=2 * least, batch_bytes=64 * KIB)
    assert roomy.fits(13, budget)


@pytest.mark.parametrize(
    ("needed", "rises"),
    [
        ({}, True),
        ({8: 100}, True),
        ({8: 100, 16: 150}, True),
        ({8: 101, 16: 100}, True),  # by chance
        ({773: 162, 1571: 156}, False),
        ({8: 100, 16: 150, 32: 120}, False),
    ],
)
def test_sums_of_sparse_gradients_are_noticed(
    needed: dict[int, int], rises: bool
) -> None:
    assert rises_with_size(needed) == rises
