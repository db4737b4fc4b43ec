"""How fast a device is, from what its shares took, and whether other shares pay.

Covers: a device's speed fitted to timings; for how many steps they are taken; shares
that are changed only for a gain worth it. Does not cover: the shares themselves
(``shares.py``), and who measures (``oomrun.worker.sharing``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomrun.core.shares import Replica, Shares, Speed, share_out

__all__ = ["FIRST_WINDOW", "Timing", "fitted", "longer", "worth"]

#: Whole batches of which the times are taken before shares are looked at.
FIRST_WINDOW = 8
_LONGEST_WINDOW = 512

# Other shares are other roundings, and with XLA other compilations: not for less.
_GAIN = 0.1
# Passes a sample have to differ so much before what a pass costs can be told apart.
_APART = 1.2
# Speeds that differ by less than such a step are the same; the noise is larger.
_STEP = math.log(1.05)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one worker's share of one step has taken it, up to its gradients."""

    passes: int
    samples: int
    seconds: float


def longer(window: int) -> int:
    """How many whole batches to time next; so shares change ever more seldom."""
    return min(_LONGEST_WINDOW, 2 * window)


def fitted(timings: Sequence[Timing]) -> Speed | None:
    """The speed that explains the timings best; None where there are none.

    Where all have about as many passes for a sample, what a pass costs cannot be told
    from what its samples cost. It then counts as the samples' own: right for shares in
    passes of that size.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for timing in timings:
        if timing.samples > 0 and timing.seconds > 0:
            key = (timing.passes, timing.samples)
            groups.setdefault(key, []).append(timing.seconds)
    if not groups:
        return None
    # Half of them may be disturbed.
    points = [(*key, statistics.median(took)) for key, took in groups.items()]
    weights = [len(took) / statistics.median(took) ** 2 for took in groups.values()]
    ratios = [passes / samples for passes, samples, _ in points]
    found = None
    if max(ratios) >= _APART * min(ratios):
        found = _both(points, weights)
    if found is None:
        pairs = list(zip(points, weights, strict=True))
        total = sum(weight * seconds for (_, _, seconds), weight in pairs)
        found = 0.0, total / sum(weight * samples for (_, samples, _), weight in pairs)
    return Speed(*map(_rounded, found))


def _both(
    points: Sequence[tuple[int, int, float]], weights: Sequence[float]
) -> tuple[float, float] | None:
    """Least squares of relative errors; None where a pass or a sample costs nothing."""
    pp = pn = nn = pt = nt = 0.0
    for (passes, samples, seconds), weight in zip(points, weights, strict=True):
        pp += weight * passes * passes
        pn += weight * passes * samples
        nn += weight * samples * samples
        pt += weight * passes * seconds
        nt += weight * samples * seconds
    determinant = pp * nn - pn * pn
    if determinant <= 0:
        return None
    pass_s = (pt * nn - nt * pn) / determinant
    sample_s = (nt * pp - pt * pn) / determinant
    return (pass_s, sample_s) if pass_s >= 0 and sample_s > 0 else None


def _rounded(seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    return math.exp(round(math.log(seconds) / _STEP) * _STEP)


def worth(samples: int, now: Shares, replicas: Sequence[Replica]) -> Shares | None:
    """Shares by speed, where the step gets shorter by them by enough; else None.

    Args:
        samples: of the batch.
        now: the shares it has now.
        replicas: the devices as they are known by now.
    """
    speeds = [replica.speed for replica in replicas]
    if any(speed is None for speed in speeds):
        return None
    before = max(
        speed.seconds(part.share, max(1, min(part.micro_batch_size, most)))
        for part, speed, most in zip(
            now.parts, speeds, (r.micro_batch_max for r in replicas), strict=True
        )
        if speed is not None
    )
    found = share_out(samples, replicas)
    if found.slowest_s is None or found.slowest_s > before * (1 - _GAIN):
        return None
    saved = round(100 * (1 - found.slowest_s / before))
    return replace(
        found, reason=f"shares by measured speed: a step gets {saved} % shorter"
    )
