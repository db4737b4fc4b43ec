"""What a device may use, and what a plan is predicted to use.

Covers: limits and budgets; a prediction, as an interval, from what is known of a model.
Does not cover: how that is learnt (``worker/probing.py``), which size is tried next
(``probing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["MemoryModel", "Peak", "budget_bytes", "limit_grew"]

# How far the upper end of a prediction lies above the most likely value, as a fraction
# of what depends on the micro-batch. Measured on the models of ``benchmarks/zoo``.
#: A size that ran: from step to step, with the order that the executor happens to take.
_SAME = 0.03
#: Between two sizes that ran, or above them along their line, by the size's ratio.
_LINE, _LINE_PER_DOUBLING = 0.04, 0.12
#: Below all sizes that ran, where less is known of what does not shrink.
_BELOW = 0.25
#: From one size that ran, in proportion: what does not depend on the size makes this
#: too much for a larger one, and too little for a smaller one.
_ONE, _ONE_BELOW = 0.12, 1.0
#: From the graph alone, of which real steps took 1.4 to 2.1 times as much.
_STATIC = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A predicted peak, in bytes: the most likely value and the upper end."""

    bytes: int
    high_bytes: int


def budget_bytes(limit_bytes: int, headroom: float | int) -> int:
    """The bytes we plan into: ``limit_bytes`` less the headroom.

    Args:
        limit_bytes: bytes that the device may use.
        headroom: a fraction of the limit (float, below 1) or bytes (int).
    """
    kept = int(limit_bytes * headroom) if isinstance(headroom, float) else headroom
    return max(0, limit_bytes - kept)


def limit_grew(then_bytes: int | None, now_bytes: int | None) -> bool:
    """Whether a limit is so much higher that what failed before may fit now.

    A tenth, since a GPU's limit is what is free on it, which is never twice the same.
    None is no limit.
    """
    if then_bytes is None:
        return False
    return now_bytes is None or now_bytes > then_bytes * 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What is known of a model's memory, in bytes.

    Attributes:
        state_bytes: the peak at no samples: weights, gradients, optimizer slots, what
            the script holds on the device.
        measured: the peak of a step by micro-batch size, the highest seen.
        static: what the step's graph says of its peak, by micro-batch size, without
            what is in use between steps.
    """

    state_bytes: int | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    static: Mapping[int, int] = field(default_factory=dict)

    def predict(self, micro_batch_size: int) -> Peak | None:
        """The peak of a step at ``micro_batch_size``; None where nothing is known.

        A size that was measured predicts itself. Another is read off the line through
        the measured sizes next to it, of which the largest count: small ones mislead,
        since what does not depend on the size rules them. With one measured size the
        state is the line's other end; with none the graph's figures count.
        """
        size = micro_batch_size
        rest = min([self.state_bytes or 0, *self.measured.values()])
        if size in self.measured:
            return _peak(self.measured[size], rest, _SAME)
        if len(self.measured) > 1:
            (below, low), (above, high) = self._next_to(size)
            slope = max(0.0, (high - low) / (above - below))
            # Above all that ran nothing shrinks with the size.
            spread = _LINE + _LINE_PER_DOUBLING * max(0.0, size / above - 1)
            if size < below:
                peak = _on(low, slope, size - below)
                return _less_than(_peak(peak, rest, _BELOW), low)
            return _peak(_on(high, slope, size - above), rest, spread)
        if self.measured:
            ((ran, peak),) = self.measured.items()
            line = _on(rest, (peak - rest) / ran, size)
            if size < ran:
                return _less_than(_peak(line, rest, _ONE_BELOW), peak)
            return _peak(line, rest, _ONE)
        if self.static and self.state_bytes is not None:
            return _peak(rest + int(self._static_at(size)), rest, _STATIC)
        return None

    def largest_within(self, budget_bytes: int, at_most: int) -> int:
        """The largest size whose upper end is within the budget; 0 where none is."""
        fits, too_large = 0, at_most + 1
        while too_large - fits > 1:
            size = (fits + too_large) // 2
            peak = self.predict(size)
            if peak is not None and peak.high_bytes <= budget_bytes:
                fits = size
            else:
                too_large = size
        return fits

    def _next_to(self, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The two measured sizes around ``size``, or the two nearest to it."""
        points = sorted(self.measured.items())
        for pair in pairwise(points):
            if size < pair[1][0]:
                return pair
        return points[-2], points[-1]

    def _static_at(self, size: int) -> float:
        """The graph's peak at ``size``, along the lines between its figures."""
        points = sorted(self.static.items())
        if len(points) == 1:
            ((at, peak),) = points
            return peak * size / at
        pair = next((p for p in pairwise(points) if size < p[1][0]), points[-2:])
        (below, low), (above, high) = pair
        return max(1.0, low + (high - low) / (above - below) * (size - below))


def _less_than(peak: Peak, larger: int) -> Peak:
    """``peak`` of a size below one that needed ``larger`` bytes."""
    return Peak(bytes=min(peak.bytes, larger), high_bytes=min(peak.high_bytes, larger))


def _on(start: float, slope: float, distance: float) -> int:
    return int(max(0.0, start + slope * distance))


def _peak(peak: int, rest: int, spread: float) -> Peak:
    return Peak(bytes=peak, high_bytes=int(peak + max(0, peak - rest) * spread))
