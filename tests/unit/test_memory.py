"""What is predicted from a graph's figures, from sizes that ran, and between them."""

from __future__ import annotations

from typing import Any

import pytest

from oomrun.core.allocations import HELD, Recording
from oomrun.core.convolutions import Buffer
from oomrun.core.memory import MemoryModel
from oomrun.core.probing import Asked, NothingFits, Settled, Try, next_step
from oomrun.core.recorded import Recorded

MIB = 2**20


def model(**known: Any) -> MemoryModel:
    return MemoryModel(**{"state_bytes": 10 * MIB, **known})


def asked(**fields: Any) -> Asked:
    given = {
        "samples": 256,
        "at_most": 256,
        "budget_bytes": 200 * MIB,
        "trials_left": 3,
    }
    return Asked(**{**given, **fields})


def test_nothing_known_predicts_nothing() -> None:
    assert model().predict(8) is None
    assert MemoryModel(static={256: MIB}).predict(8) is None


def test_a_size_that_ran_predicts_itself() -> None:
    peak = model(measured={32: 90 * MIB, 64: 170 * MIB}).predict(64)
    assert peak is not None
    assert peak.bytes == 170 * MIB
    assert 170 * MIB < peak.high_bytes < 185 * MIB


def test_the_graph_alone_is_a_wide_interval() -> None:
    usual = model(static={256: 400 * MIB})
    peak = usual.predict(64)
    assert peak is not None
    assert peak.bytes == 110 * MIB
    assert peak.high_bytes >= 10 * MIB + 2.1 * 100 * MIB
    ordered = model(static={256: 400 * MIB}, in_order=True).predict(64)
    assert ordered is not None
    assert peak.bytes < ordered.high_bytes < peak.high_bytes


def test_above_what_ran_the_steeper_of_line_and_graph_counts() -> None:
    # The line through two small sizes is flat: most of them is a workspace.
    flat = {16: 60 * MIB, 32: 62 * MIB}
    without, with_graph = (
        model(measured=flat),
        model(measured=flat, static={64: 64 * MIB}),
    )
    line, graph = without.predict(64), with_graph.predict(64)
    assert line is not None
    assert graph is not None
    assert line.bytes == 66 * MIB
    assert graph.bytes >= 94 * MIB


@pytest.mark.parametrize("in_order", [True, False])
def test_a_jump_may_lie_anywhere_between_two_sizes(in_order: bool) -> None:
    ran = {48: 116 * MIB, 55: 150 * MIB}
    known = model(measured=ran, static={55: 55 * MIB}, in_order=in_order)
    peak = known.counted(50)
    assert peak is not None
    assert peak.high_bytes >= 150 * MIB
    smooth = {48: 116 * MIB, 55: 123 * MIB}
    peak = model(measured=smooth, static={55: 55 * MIB}, in_order=True).counted(50)
    assert peak is not None
    assert peak.high_bytes <= 123 * MIB


def test_what_the_allocator_wasted_is_not_needed() -> None:
    ran = {92: 80 * MIB, 185: 124 * MIB, 200: 125 * MIB}
    static = {200: 40 * MIB}
    known = model(measured=ran, static=static, in_order=True)
    assert known.needed[92] == 80 * MIB
    assert known.needed[185] == pytest.approx((80 + 1.5 * 93 * 0.2) * MIB, rel=1e-6)
    assert known.needed[185] < known.needed[200] < 125 * MIB
    for other in (
        model(measured=ran, static=static),  # more than the graph's is its order's
        model(measured=ran, static=static, in_order=True, loops=True),
        model(measured=ran, in_order=True),
    ):
        assert other.needed == ran
    for size, likely in ((185, 124), (176, 124)):
        counted = known.counted(size)
        assert counted is not None
        assert counted.bytes == counted.high_bytes == likely * MIB
    smaller = known.counted(120)
    assert smaller is not None
    assert smaller.bytes < 100 * MIB
    assert smaller.high_bytes == 124 * MIB


@pytest.mark.parametrize(("limit", "high"), [(125, 125), (200, 104), (None, 104)])
def test_a_pool_that_is_nearly_needed_may_all_be_handed_out(
    limit: int | None, high: int
) -> None:
    known = model(measured={92: 101 * MIB}, static={92: 40 * MIB}, in_order=True)
    peak = known.counted(92, None if limit is None else limit * MIB)
    assert peak is not None
    assert peak.bytes == 101 * MIB
    assert peak.high_bytes == pytest.approx(high * MIB, rel=0.01)


@pytest.mark.parametrize("static", [{}, {256: 1000 * MIB}])
def test_below_all_that_ran_nothing_needs_more(static: dict[int, int]) -> None:
    known = model(measured={64: 100 * MIB}, static=static)
    for size in range(1, 64):
        peak = known.predict(size)
        assert peak is not None
        assert peak.bytes <= peak.high_bytes <= 100 * MIB


def test_what_is_far_below_the_budget_is_not_tried() -> None:
    step = next_step(model(static={256: 40 * MIB}), asked())
    assert isinstance(step, Settled)
    assert step.size == 256
    assert step.surely


def test_a_trial_first_where_it_is_not_sure() -> None:
    step = next_step(model(static={256: 400 * MIB}), asked())
    assert isinstance(step, Try)
    assert 1 < step.size < 128


def test_nothing_known_begins_small() -> None:
    assert next_step(model(), asked()) == Try(size=2)


def test_no_trial_is_far_above_what_ran() -> None:
    step = next_step(model(measured={2: 11 * MIB}), asked())
    assert step == Try(size=8)


def test_a_trial_that_failed_is_halved() -> None:
    known = model(measured={40: 90 * MIB}, static={256: 100 * MIB})
    step = next_step(known, asked(failed=120))
    assert isinstance(step, Try)
    assert 40 < step.size <= 80


def test_one_sample_that_failed_leaves_nothing() -> None:
    assert isinstance(next_step(model(), asked(failed=1)), NothingFits)


@pytest.mark.parametrize(
    ("ran", "least", "most"),
    [
        ({64: 150 * MIB, 80: 180 * MIB, 96: 210 * MIB}, 80, 95),
        ({64: 150 * MIB, 80: 182 * MIB}, 80, 80),
        ({80: 201 * MIB}, 40, 79),  # it ran, but came above the budget
    ],
)
def test_what_is_remembered_is_not_tried_again(
    ran: dict[int, int], least: int, most: int
) -> None:
    step = next_step(model(measured=ran), asked(remembered=True))
    assert isinstance(step, Settled)
    assert least <= step.size <= most


def test_clearly_more_memory_than_remembered_is_tried() -> None:
    known = model(measured={40: 90 * MIB, 50: 110 * MIB})
    step = next_step(known, asked(remembered=True))
    assert isinstance(step, Try)
    assert step.size > 62


def test_the_users_own_bound_holds() -> None:
    step = next_step(model(static={256: 40 * MIB}), asked(at_most=16))
    assert isinstance(step, Settled)
    assert step.size == 16


@pytest.mark.parametrize("in_order", [True, False])
def test_what_is_counted_of_a_recorded_size_is_what_was_seen_of_it(
    in_order: bool,
) -> None:
    step = Recording(
        size=31, layout=((10 * MIB, HELD),), early=0, requests=(31 * MIB,),
        moves=(0, ~0), telling=True,
    )  # fmt: skip
    recorded = Recorded(pools={31: 41 * MIB}, best=step, pool_bytes=100 * MIB)
    known = model(measured={31: 44 * MIB}, recorded=recorded, in_order=in_order)
    seen, larger = known.counted(31, 100 * MIB), known.counted(62, 100 * MIB)
    assert seen is not None
    assert larger is not None
    assert seen.bytes == 44 * MIB
    # More than half of what is free is handed out whole, and near the limit all may be.
    assert larger.bytes == larger.high_bytes == 100 * MIB
    assert known.needed == {31: 41 * MIB}
    assert known.largest_within(80 * MIB, 200) in range(55, 70)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("ran", [{}, {7: 17 * MIB}])
def test_a_buffer_counts_from_the_size_on_that_takes_it(
    ran: dict[int, int], recorded: bool
) -> None:
    step = Recording(
        size=7, layout=((10 * MIB, HELD),), early=0, requests=(7 * MIB,),
        moves=(0, ~0), telling=True,
    )  # fmt: skip
    buffers = (Buffer(bytes=80 * MIB, least_samples=11),)
    told = (
        Recorded(pools=ran, best=step if ran else None, spread=0.02, buffers=buffers)
        if recorded
        else Recorded(buffers=buffers)
    )
    known = model(
        static={96: 96 * MIB}, measured=ran, in_order=True, recorded=told,
    )  # fmt: skip
    below, above = known.predict(10), known.predict(11)
    assert below is not None
    assert above is not None
    assert 79 * MIB < above.bytes - below.bytes < 84 * MIB
    assert above.high_bytes - below.high_bytes < 88 * MIB
    # The buffer's own size is certain.
    assert above.high_bytes - above.bytes < below.high_bytes - below.bytes + 5 * MIB
    assert known.largest_within(88 * MIB, 96) == 10
    assert known.largest_within(125 * MIB, 96) > 10
