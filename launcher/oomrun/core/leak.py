"""Memory that is taken and never given back: seen early, with a forecast.

Covers: ``Growth``, what is kept of the bytes in use at rest (after a step, when its own
tensors are gone), and the ``Forecast`` made from it. Does not cover: reading them, and
what is done about a leak.

Over windows of many lengths a line is laid through the lowest points, so that garbage
waiting for its collection does not count. Its slope is the median of the slopes of all
pairs, its interval comes from Kendall's rank statistic: Theil, "A rank-invariant method
of linear and polynomial regression analysis", 1950; Sen, "Estimates of the regression
coefficient based on Kendall's tau", JASA 63 (1968), 1379-1389.

Nothing tells a leak from a cache that is being filled, but that one of them ends. So a
forecast is confident only once three fifths of the bytes that were free when the window
began are gone: what ends well before that is never called a leak.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Forecast", "Growth"]

# A window ends now and has at most so many points; each is the lowest of twice as many
# samples as a point of the window before it has, so that some window covers most of
# any growth, whenever that began.
_POINTS = 32
_FEWEST = 12
_WINDOWS = 28
# Of the samples themselves shorter windows are looked at, too: a fast leak has few.
_SHORT = (12, 16, 22)
# Two-sided 99 % of the normal distribution, which Kendall's statistic is close to.
_DEVIATIONS = 2.576
_USED = 0.6
# Growth is steady where the medians of blocks rise from each to the next. With the two
# largest rises left out, a line keeps three of five; two jumps keep nothing.
_BLOCKS = 6
_JUMPS = 2
_STEADY = 0.35
# How far growth that slows down is thought to come, since its ratio is not exact.
_DOUBT = 2.0

_Point = tuple[int, int]  # step, bytes in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How memory grows, and when it will be at the budget if it goes on like that.

    Attributes:
        bytes_per_step: the most likely growth.
        low_bytes_per_step: with 99 % likelihood it is not below this.
        high_bytes_per_step: nor above this.
        steps_left: steps from the last sample until the budget is reached.
        soonest_steps_left: the same for the highest growth.
        confident: it is a leak: steady, not about to end, most of the room is gone.
    """

    bytes_per_step: float
    low_bytes_per_step: float
    high_bytes_per_step: float
    steps_left: int
    soonest_steps_left: int
    confident: bool


@dataclass(frozen=True, slots=True)
class _Window:
    """The last points, and one that waits for its neighbour to go on to the next."""

    points: tuple[_Point, ...] = ()
    waiting: _Point | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """The bytes in use at rest so far, in a few hundred points at most."""

    _windows: tuple[_Window, ...] = ()

    def after(self, step: int, in_use_bytes: int) -> Growth:
        """What is known after one more sample.

        Args:
            step: optimizer steps taken. A sample of the same step again is dropped;
                one of an earlier step begins anew.
            in_use_bytes: bytes in use after it.
        """
        if self._windows:
            last_step, _ = self._windows[0].points[-1]
            if step == last_step:
                return self
            if step < last_step:
                return Growth().after(step, in_use_bytes)
        windows: list[_Window] = []
        point: _Point = (step, in_use_bytes)
        for window in (*self._windows, _Window())[:_WINDOWS]:
            points = (*window.points, point)[-_POINTS:]
            if window.waiting is None:
                windows.append(_Window(points, point))
                break
            windows.append(_Window(points))
            point = min(window.waiting, point, key=lambda item: item[1])
        return Growth((*windows, *self._windows[len(windows) :]))

    def forecast(self, budget_bytes: int) -> Forecast | None:
        """When the budget will be reached; None while nothing seems to grow.

        Args:
            budget_bytes: what may be in use at rest: the device's budget less what a
                step takes on top for its own time.
        """
        if not self._windows:
            return None
        recent = self._windows[0].points
        leaks = [
            forecast
            for points in self._suspects()
            if _takes_most(points, budget_bytes)
            if (forecast := _forecast(points, recent, budget_bytes)) is not None
            and not _ends_within(points, budget_bytes)
        ]
        if leaks:
            soonest = min(leaks, key=lambda forecast: forecast.steps_left)
            return replace(soonest, confident=True)
        longest = [w.points for w in self._windows if len(w.points) >= _FEWEST]
        return _forecast(longest[-1], recent, budget_bytes) if longest else None

    def _suspects(self) -> Iterator[Sequence[_Point]]:
        """The windows that a leak may be seen in."""
        samples = self._windows[0].points
        yield from (samples[-count:] for count in _SHORT if count < len(samples))
        yield from (w.points for w in self._windows if len(w.points) >= _FEWEST)


def _takes_most(points: Sequence[_Point], budget_bytes: int) -> bool:
    """Whether most of the room there was is gone, and not in one or two jumps."""
    edges = [len(points) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    sizes = [
        # One of its points, so that a jump within a block is no slope.
        statistics.median_low(size for _, size in points[begin:end])
        for begin, end in itertools.pairwise(edges)
    ]
    # The blocks' medians are those of their middles.
    grown = (sizes[-1] - sizes[0]) * _BLOCKS / (_BLOCKS - 1)
    begun = sizes[0] - grown / _BLOCKS / 2
    if grown <= 0 or grown < _USED * (budget_bytes - begun):
        return False
    rises = sorted(b - a for a, b in itertools.pairwise(sizes))
    return sum(rises[:-_JUMPS]) >= _STEADY * (sizes[-1] - sizes[0])


def _forecast(
    points: Sequence[_Point], recent: Sequence[_Point], budget_bytes: int
) -> Forecast | None:
    slope, low, high = _slopes(points)
    if low <= 0:
        return None
    # The line, as bytes at step 0, and how far above it memory has lately been.
    level = statistics.median(size - slope * step for step, size in points)
    above = max(size - (level + slope * step) for step, size in recent)
    now = level + slope * recent[-1][0] + max(0.0, above)
    room = max(0.0, budget_bytes - now)
    return Forecast(
        bytes_per_step=slope,
        low_bytes_per_step=low,
        high_bytes_per_step=high,
        steps_left=int(room / slope),
        soonest_steps_left=int(room / high),
        confident=False,
    )


def _slopes(points: Sequence[_Point]) -> tuple[float, float, float]:
    """The median slope of all pairs, and the ends of its interval."""
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)
    )
    count = len(points)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    half = _DEVIATIONS * deviation / 2
    low = max(0, math.floor(len(slopes) / 2 - half))
    high = min(len(slopes) - 1, math.ceil(len(slopes) / 2 + half))
    return statistics.median(slopes), slopes[low], slopes[high]


def _ends_within(points: Sequence[_Point], budget_bytes: int) -> bool:
    """Whether growth that slows down as it did would end before the budget.

    What grows less in each half, by the same ratio, grows in all by the sum of a
    geometric series.
    """
    half = len(points) // 2
    first, _, _ = _slopes(points[:half])
    second, _, _ = _slopes(points[-half:])
    if second >= first:
        return False
    ratio = max(0.0, second / first)
    coming = second * (points[-1][0] - points[-half][0]) * ratio / (1 - ratio)
    return coming < _DOUBT * (budget_bytes - points[-1][1])
