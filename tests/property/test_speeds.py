"""Speeds from timings, and shares that change only where it pays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import speeds
from oomrun.core.shares import Replica, Shares, Speed, share_out
from oomrun.core.speeds import Timing

known = st.builds(Speed, pass_s=st.floats(0.001, 1), sample_s=st.floats(0.001, 1))
replicas = st.builds(Replica, st.integers(1, 300), known)


def timings(speed: Speed, cuts: list[tuple[int, int]]) -> list[Timing]:
    """What shares of so many samples take in passes of so many."""
    return [
        Timing(-(-share // size), share, speed.seconds(share, size))
        for share, size in cuts
    ]


@given(known)
def test_a_speed_is_found_again(speed: Speed) -> None:
    found = speeds.fitted(timings(speed, [(64, 8), (30, 30), (40, 8)]))
    assert found is not None
    assert found.pass_s == pytest.approx(speed.pass_s, rel=0.04)
    assert found.sample_s == pytest.approx(speed.sample_s, rel=0.04)


@given(known, st.integers(1, 100))
def test_of_one_kind_of_share_the_time_for_a_sample_is_known(
    speed: Speed, share: int
) -> None:
    found = speeds.fitted(timings(speed, [(share, 10)] * 3))
    assert found is not None
    assert found.pass_s == 0
    assert found.seconds(share, 10) == pytest.approx(speed.seconds(share, 10), rel=0.03)


def test_some_that_were_disturbed_do_no_harm() -> None:
    some = timings(Speed(0.1, 0.01), [(64, 8)] * 5 + [(30, 30)] * 5)
    disturbed = [Timing(t.passes, t.samples, 9 * t.seconds) for t in some[3:7]]
    random.Random(4).shuffle(disturbed)
    found = speeds.fitted([*some[:3], *disturbed, *some[7:]])
    assert found == speeds.fitted(some)


@pytest.mark.parametrize("nothing", [[], [Timing(0, 0, 1.0)], [Timing(1, 4, -1.0)]])
def test_without_a_time_there_is_no_speed(nothing: list[Timing]) -> None:
    assert speeds.fitted(nothing) is None


@given(st.integers(1, 500), st.lists(replicas, min_size=1, max_size=6))
def test_shares_change_for_a_gain_and_then_stay(
    samples: int, found: list[Replica]
) -> None:
    now = share_out(samples, [Replica(r.micro_batch_max) for r in found])
    new = speeds.worth(samples, now, found)
    if new is None:
        return
    assert sum(part.share for part in new.parts) == samples
    assert slowest(new, found) < 0.91 * slowest(now, found)
    assert speeds.worth(samples, new, found) is None


def slowest(shares: Shares, found: list[Replica]) -> float:
    return max(
        r.speed.seconds(part.share, max(1, part.micro_batch_size))
        for part, r in zip(shares.parts, found, strict=True)
        if r.speed is not None
    )


def test_devices_nearly_alike_keep_equal_shares() -> None:
    found = [Replica(64, Speed(0.1, 0.010)), Replica(64, Speed(0.1, 0.011))]
    now = share_out(96, [Replica(64)] * 2)
    assert speeds.worth(96, now, found) is None


def test_one_that_is_not_known_keeps_all_as_they_are() -> None:
    found = [Replica(64, Speed(0.1, 0.010)), Replica(8)]
    assert speeds.worth(96, share_out(96, [Replica(64)] * 2), found) is None


def test_windows_grow() -> None:
    sizes = [speeds.FIRST_WINDOW]
    for _ in range(10):
        sizes.append(speeds.longer(sizes[-1]))
    assert sizes[:4] == [8, 16, 32, 64]
    assert sizes[-1] == sizes[-2] == 512
