"""How one global batch is shared out over replicas that are not alike.

Covers: each replica's share and micro-batch from what fits on its device and, where
that was measured, from how fast it is. Memory bounds the micro-batch only: a device on
which little fits takes a large share in many passes, if it is fast enough.
Does not cover: what fits (``memory.py``), and who measures.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from oomrun.core.batch import accumulation_steps
from oomrun.core.errors import InfeasiblePlanError

__all__ = ["Part", "Replica", "Shares", "Speed", "share_out"]

# So much may the slowest device be slower than the best of all plans, relatively.
_CLOSE = 1e-12


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device's passes take, forwards and backwards.

    Attributes:
        pass_s: seconds that each pass takes, however small it is.
        sample_s: seconds more for each sample; above 0.
    """

    pass_s: float
    sample_s: float

    def seconds(self, share: int, micro_batch_size: int) -> float:
        """For ``share`` samples, at most ``micro_batch_size`` a pass."""
        if share == 0:
            return 0.0
        passes = accumulation_steps(share, micro_batch_size)
        return passes * self.pass_s + share * self.sample_s


@dataclass(frozen=True, slots=True)
class Replica:
    """What is known of one device.

    Attributes:
        micro_batch_max: samples of the largest pass that fits; 0: not even one.
        speed: None while it was not measured.
    """

    micro_batch_max: int
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one replica does of each global batch.

    Attributes:
        start: the first of its samples.
        share: how many they are; it may have none.
        micro_batch_size: samples a pass, at most; 0 for an empty share.
    """

    start: int
    share: int
    micro_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The whole of it.

    Attributes:
        parts: one for each replica, in their order; together, each sample once.
        slowest_s: seconds of the slowest replica; None where speeds are not known.
        reason: one sentence.
    """

    parts: tuple[Part, ...]
    slowest_s: float | None
    reason: str


def share_out(global_batch_size: int, replicas: Sequence[Replica]) -> Shares:
    """The shares with which the slowest replica is done soonest.

    Where a speed is missing nobody can say so. Then they are equal, unless each replica
    can do with one pass where they are not.

    Args:
        global_batch_size: samples of the batch, 0 or more.
        replicas: one for each device; of those alike, shares differ by 1 at most.

    Raises:
        InfeasiblePlanError: not one sample fits on any of them.
    """
    kinds = _kinds(replicas)
    if not kinds:
        raise InfeasiblePlanError("not even one sample fits on any of the devices")
    measured = all(kind.replica.speed is not None for kind in kinds)
    if measured:
        totals = _soonest(global_batch_size, kinds)
        reason = "shares by speed: all devices are done at about the same time"
    else:
        room = sum(kind.count * kind.replica.micro_batch_max for kind in kinds)
        in_one_pass = room >= global_batch_size
        bounds = [
            kind.replica.micro_batch_max if in_one_pass else global_batch_size
            for kind in kinds
        ]
        totals = _level(global_batch_size, kinds, bounds)
        reason = _why_level(global_batch_size, kinds, in_one_pass)
    parts, slowest = _parts(replicas, kinds, totals), None
    if measured:
        slowest = max(
            kind.speed.seconds(
                parts[kind.places[0]].share, kind.replica.micro_batch_max
            )
            for kind in kinds
        )
    left_out = len(replicas) - sum(kind.count for kind in kinds)
    if left_out:
        reason += f"; not one sample fits on {left_out} of the {len(replicas)} devices"
    return Shares(parts=parts, slowest_s=slowest, reason=reason)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Replicas that are alike, and their places among all."""

    replica: Replica
    places: list[int]

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def speed(self) -> Speed:
        assert self.replica.speed is not None
        return self.replica.speed


def _kinds(replicas: Sequence[Replica]) -> list[_Kind]:
    """Those on which anything fits."""
    places: dict[Replica, list[int]] = {}
    for index, replica in enumerate(replicas):
        if replica.micro_batch_max > 0:
            places.setdefault(replica, []).append(index)
    return [_Kind(replica, at) for replica, at in places.items()]


# --- by speed -----------------------------------------------------------------------


def _soonest(samples: int, kinds: Sequence[_Kind]) -> list[int]:
    """Samples for all replicas of each kind, so that the slowest is done soonest.

    By halving the interval that the slowest's time is in, until it is so short that
    nobody's share hangs on it any more.
    """
    counts = [kind.count for kind in kinds]
    soon, late = _bounds(samples, kinds)
    less = [min(samples, _capacity(kind.replica, soon)) for kind in kinds]
    more = [min(samples, _capacity(kind.replica, late)) for kind in kinds]
    done, open_ = 0, list(range(len(kinds)))
    while late - soon > _CLOSE * late:
        middle = (soon + late) / 2
        between = [min(samples, _capacity(kinds[i].replica, middle)) for i in open_]
        if done + sum(counts[i] * n for i, n in zip(open_, between, strict=True)) >= (
            samples
        ):
            late, bound = middle, more
        else:
            soon, bound = middle, less
        for i, n in zip(open_, between, strict=True):
            bound[i] = n
        settled = [i for i in open_ if more[i] <= less[i]]
        if settled:
            done += sum(counts[i] * less[i] for i in settled)
            open_ = [i for i in open_ if more[i] > less[i]]
    # What does not fit before is taken by those that can within the last moment.
    totals = list(map(operator.mul, counts, less))
    missing = samples - sum(totals)
    for i in open_:
        extra = min(missing, counts[i] * (more[i] - less[i]))
        totals[i] += extra
        missing -= extra
    if missing:  # by rounding: a moment later anybody could
        totals[max(range(len(kinds)), key=more.__getitem__)] += missing
    return totals


def _bounds(samples: int, kinds: Sequence[_Kind]) -> tuple[float, float]:
    """Seconds in which it cannot be done, and in which it surely can."""
    speeds = [(kind.count, kind.replica.micro_batch_max, kind.speed) for kind in kinds]
    # Nobody does more a second than in passes of full size, nor waits for one longer
    # than for all of it. And not all together are slower than one alone.
    passes = [(n, size, speed.pass_s + size * speed.sample_s)
              for n, size, speed in speeds]  # fmt: skip
    soon = samples / sum(n * size / pass_s for n, size, pass_s in passes)
    late = soon + max(pass_s for _, _, pass_s in passes)
    alone = min(speed.seconds(samples, size) for _, size, speed in speeds)
    return soon * (1 - _CLOSE), min(late, alone) * (1 + _CLOSE)


def _capacity(replica: Replica, seconds: float) -> int:
    """Samples that it can do in so many seconds."""
    size, speed = replica.micro_batch_max, replica.speed
    assert speed is not None
    whole_s = speed.pass_s + size * speed.sample_s
    passes = int(seconds / whole_s)
    rest = seconds - passes * whole_s - speed.pass_s
    more = int(rest / speed.sample_s) if rest > 0 else 0
    return passes * size + min(size, more)


# --- without speeds -----------------------------------------------------------------


def _level(samples: int, kinds: Sequence[_Kind], bounds: Sequence[int]) -> list[int]:
    """As equal as each one's bound allows."""

    def below(level: int) -> list[int]:
        pairs = zip(kinds, bounds, strict=True)
        return [kind.count * min(bound, level) for kind, bound in pairs]

    low, high = 0, samples
    while low < high:
        level = (low + high) // 2
        if sum(below(level)) >= samples:
            high = level
        else:
            low = level + 1
    totals = below(max(0, low - 1))
    missing = samples - sum(totals)
    for index, kind in enumerate(kinds):
        if bounds[index] >= low:
            extra = min(missing, kind.count)
            totals[index] += extra
            missing -= extra
    return totals


def _why_level(samples: int, kinds: Sequence[_Kind], in_one_pass: bool) -> str:
    most = -(-samples // sum(kind.count for kind in kinds))
    if not in_one_pass:
        return "equal shares, since not every device's speed was measured"
    if all(kind.replica.micro_batch_max >= most for kind in kinds):
        return "equal shares, each in one pass"
    return "shares by what fits: each device does its own in one pass"


# --- one by one ---------------------------------------------------------------------


def _parts(
    replicas: Sequence[Replica], kinds: Sequence[_Kind], totals: Sequence[int]
) -> tuple[Part, ...]:
    """Each replica's part, with those of a kind as equal as can be."""
    shares = [0] * len(replicas)
    for kind, total in zip(kinds, totals, strict=True):
        least, ones_more = divmod(total, kind.count)
        for place, index in enumerate(kind.places):
            shares[index] = least + (place < ones_more)
    parts, start = [], 0
    for replica, share in zip(replicas, shares, strict=True):
        parts.append(Part(start, share, _micro_batch(share, replica.micro_batch_max)))
        start += share
    return tuple(parts)


def _micro_batch(share: int, most: int) -> int:
    """As few passes as fit, and those of about one size."""
    if share == 0:
        return 0
    return -(-share // accumulation_steps(share, most))
