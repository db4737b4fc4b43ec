"""Whatever the devices: each sample once, no pass too large, none done sooner."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.shares import Replica, Shares, Speed, share_out

speeds = st.builds(
    Speed, pass_s=st.floats(0, 10), sample_s=st.floats(1e-6, 10, exclude_min=True)
)
measured = st.builds(Replica, st.integers(0, 300), speeds)
unmeasured = st.builds(Replica, st.integers(0, 300))
some = st.lists(measured, min_size=1, max_size=8) | st.lists(
    measured | unmeasured, min_size=1, max_size=8
)
batches = st.integers(0, 2000)


def planned(samples: int, replicas: list[Replica]) -> Shares:
    assume(any(replica.micro_batch_max for replica in replicas))
    return share_out(samples, replicas)


def seconds(replicas: list[Replica], shares: tuple[int, ...]) -> float:
    """Of the slowest, each with the largest passes that fit."""
    return max(
        replica.speed.seconds(share, replica.micro_batch_max)
        for replica, share in zip(replicas, shares, strict=True)
        if replica.speed is not None
    )


@given(batches, some)
def test_each_sample_is_in_one_share(samples: int, replicas: list[Replica]) -> None:
    parts = planned(samples, replicas).parts
    assert len(parts) == len(replicas)
    covered = [n for part in parts for n in range(part.start, part.start + part.share)]
    assert covered == list(range(samples))


@given(batches, some)
def test_no_pass_is_larger_than_what_fits(
    samples: int, replicas: list[Replica]
) -> None:
    for part, replica in zip(planned(samples, replicas).parts, replicas, strict=True):
        assert 0 <= part.micro_batch_size <= replica.micro_batch_max
        assert part.micro_batch_size <= part.share
        assert (part.share == 0) == (part.micro_batch_size == 0)


@given(batches, some)
def test_no_pass_more_than_needed(samples: int, replicas: list[Replica]) -> None:
    for part, replica in zip(planned(samples, replicas).parts, replicas, strict=True):
        if part.share:
            passes = -(-part.share // part.micro_batch_size)
            assert passes == -(-part.share // replica.micro_batch_max)


@given(batches, some)
def test_devices_alike_have_shares_alike(samples: int, replicas: list[Replica]) -> None:
    parts = planned(samples, replicas).parts
    for kind in set(replicas):
        alike = [p.share for p, r in zip(parts, replicas, strict=True) if r == kind]
        assert max(alike) - min(alike) <= 1


@given(st.integers(1, 14), st.lists(measured, min_size=1, max_size=3))
def test_no_other_shares_are_done_sooner(samples: int, replicas: list[Replica]) -> None:
    shares = planned(samples, replicas)
    usable = [r for r in replicas if r.micro_batch_max]
    others = (
        cut for cut in itertools.product(range(samples + 1), repeat=len(usable))
        if sum(cut) == samples
    )  # fmt: skip
    best = min(seconds(usable, cut) for cut in others)
    assert shares.slowest_s is not None
    assert shares.slowest_s <= best * (1 + 1e-9)


@given(st.integers(1, 2000), st.lists(measured, min_size=1, max_size=8))
def test_equal_shares_are_not_done_sooner(
    samples: int, replicas: list[Replica]
) -> None:
    shares = planned(samples, replicas)
    usable = [r for r in replicas if r.micro_batch_max]
    least, more = divmod(samples, len(usable))
    equal = tuple(least + (n < more) for n in range(len(usable)))
    assert shares.slowest_s is not None
    assert shares.slowest_s <= seconds(usable, equal) * (1 + 1e-9)


@given(st.integers(1, 2000), st.lists(unmeasured, min_size=1, max_size=8))
def test_one_pass_each_where_that_is_possible(
    samples: int, replicas: list[Replica]
) -> None:
    parts = planned(samples, replicas).parts
    if sum(replica.micro_batch_max for replica in replicas) >= samples:
        assert all(part.share == part.micro_batch_size for part in parts)
    else:
        used = [p.share for p, r in zip(parts, replicas, strict=True)
                if r.micro_batch_max]  # fmt: skip
        assert max(used) - min(used) <= 1


@given(batches, st.integers(1, 5))
def test_nothing_fits(samples: int, devices: int) -> None:
    with pytest.raises(InfeasiblePlanError, match="not even one sample"):
        share_out(samples, [Replica(0)] * devices)
