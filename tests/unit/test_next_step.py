"""Which size is tried next, where memory does not behave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomrun.core.allocations import HELD, Recording
from oomrun.core.memory import MemoryModel
from oomrun.core.probing import Asked, Settled, Step, Try, next_step
from oomrun.core.recorded import Recorded


def step(known: MemoryModel, trials_left: int = 0, **asked: int) -> Step:
    return next_step(
        known,
        Asked(
            samples=asked.pop("samples", 8192),
            at_most=asked.pop("at_most", 8192),
            budget_bytes=asked.pop("budget_bytes", 152),
            trials_left=trials_left,
            **asked,
        ),
    )


@pytest.mark.parametrize(
    ("measured", "size"),
    [
        # A recommender's: sums of sparse gradients take as much however they are cut.
        ({1571: 172, 861: 173, 430: 173}, 1571),
        ({1571: 160, 861: 158, 430: 170}, 861),
        # Smaller takes less here, so the way goes on down.
        ({1571: 220, 861: 200, 430: 180}, 281),
        # One that is within the budget was found all the same.
        ({1571: 172, 861: 150, 430: 151}, 861),
    ],
)
def test_without_trials_left_it_ends_on_what_ran(
    measured: dict[int, int], size: int
) -> None:
    found = step(MemoryModel(state_bytes=24, measured=measured))
    assert isinstance(found, Settled)
    assert found.size == size


def test_loops_are_met_with_a_small_first_size() -> None:
    plain = MemoryModel(state_bytes=2, static={8192: 160})
    first, cautious = (
        step(known, trials_left=3)
        for known in (plain, MemoryModel(state_bytes=2, static={8192: 160}, loops=True))
    )
    assert isinstance(first, Try)
    assert isinstance(cautious, Try)
    assert cautious.size < first.size / 3
    # Where all of it is known to take ten times as much, it fits there.
    assert 10 * 160 * cautious.size / 8192 <= 152


def test_passes_of_one_size_where_each_is_compiled() -> None:
    known = MemoryModel(state_bytes=2, measured={570: 100})
    found = step(known, remembered=True, even=True)
    assert isinstance(found, Settled)
    assert 8192 % found.size == 0


def test_a_graph_that_was_wrong_is_not_believed_again() -> None:
    # Of a GRU: 817 had run out of memory, and 816 was trained without a trial.
    known = MemoryModel(state_bytes=8, static={2048: 30})
    found = step(known, trials_left=2, failed=817)
    assert isinstance(found, Try)
    assert found.size < 800


def test_what_should_be_spared_is_not_bought_with_tiny_passes() -> None:
    """A depthwise network's peak: most of it does not hang on the micro-batch."""
    ran = {123: 102, 61: 99}
    known = MemoryModel(state_bytes=24, measured=ran, static={1024: 60}, in_order=True)
    found = step(known, trials_left=1, budget_bytes=101, spare_bytes=8)
    assert isinstance(found, Settled)
    assert found.size >= 61
    one = replace(known, measured={123: 102})
    smaller = step(one, trials_left=2, budget_bytes=101, spare_bytes=8)
    assert smaller == Try(size=61)
    fitting = replace(known, measured={123: 102, 61: 90})
    found = step(fitting, trials_left=0, budget_bytes=101, spare_bytes=8)
    assert isinstance(found, Settled)
    assert 61 <= found.size < 90


def test_where_the_pool_was_full_it_goes_no_further_and_keeps_a_margin() -> None:
    """The allocator counts what it hands out, near a limit more than is needed."""
    known = MemoryModel(
        state_bytes=24, measured={90: 80, 180: 124}, static={8192: 2048}, in_order=True
    )
    found = step(known, trials_left=1, budget_bytes=115)
    reason = "micro-batch 171 x 48 (global 8192) leaves some room: 180 ran with 124B"
    assert found == Settled(size=171, reason=f"{reason} handed out")
    roomy = step(known, trials_left=1, budget_bytes=130)
    assert isinstance(roomy, Try)
    assert roomy.size > 180


def test_where_each_size_is_compiled_only_much_more_is_tried_again() -> None:
    known = MemoryModel(state_bytes=10, measured={32: 60}, static={256: 400})
    assert step(known, samples=256, trials_left=1, budget_bytes=75, even=True) == step(
        known, samples=256, trials_left=0, budget_bytes=75, even=True
    )
    much = step(known, samples=256, trials_left=1, budget_bytes=160, even=True)
    assert isinstance(much, Try)
    assert 256 % much.size == 0


def test_what_was_compiled_is_kept_where_the_pool_was_full() -> None:
    known = MemoryModel(
        state_bytes=24, measured={64: 67, 128: 124}, static={512: 130}, in_order=True
    )
    found = step(known, samples=512, trials_left=0, budget_bytes=115, even=True)
    reason = "micro-batch 128 x 4 (global 512) ran with 124B handed out"
    assert found == Settled(size=128, reason=reason)


def test_what_ran_within_the_budget_is_not_left_for_what_only_should() -> None:
    # Sums of sparse gradients: twice as many passes need more, and no recording of one
    # size tells so.
    recording = Recording(
        size=1571, layout=((100, HELD),), early=0, requests=(1571 * 32,), moves=(0, ~0),
        telling=True,
    )  # fmt: skip
    recorded = Recorded(pools={1571: 154}, best=recording, pool_bytes=165)
    known = MemoryModel(state_bytes=100, measured={1571: 149}, recorded=recorded)
    found = step(known, 2)
    assert isinstance(found, Settled)
    assert found.size == 1571
    full = replace(known, recorded=replace(recorded, pools={1571: 160}))
    assert isinstance(step(full, 2), Try)
    above = replace(known, measured={1571: 153})
    assert isinstance(step(above, 2), Try)


def test_the_reason_tells_what_has_room_and_not_what_was_handed_out() -> None:
    recorded = Recorded(pools={61: 140}, pool_bytes=165)
    known = MemoryModel(state_bytes=100, measured={61: 165}, recorded=recorded)
    found = step(known, 0, samples=128)
    assert isinstance(found, Settled)
    assert found.size == 61
    assert "has room in 140B of 152B that may be used" in found.reason


def test_a_size_that_ran_is_trained_with_where_a_smaller_one_has_failed() -> None:
    # Sums of sparse gradients: 337 failed, 677 ran, and 1 was trained with.
    known = MemoryModel(state_bytes=160, measured={677: 156}, static={8192: 187})
    found = step(known, 0, failed=337)
    assert isinstance(found, Settled)
    assert found.size == 677
    bound = step(known, 0, failed=337, at_most=400)  # it has failed in training since
    assert isinstance(bound, Settled)
    assert bound.size < 337
    fits = step(replace(known, state_bytes=20), 0, failed=337)
    assert isinstance(fits, Settled)
    assert fits.size < 337
