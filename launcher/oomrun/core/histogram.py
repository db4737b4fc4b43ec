"""Durations counted in fixed buckets, as Prometheus keeps them.

Covers: the values and how one more is added. Does not cover: how they are exported.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["CHECKPOINT_BOUNDS_S", "RECOVERY_BOUNDS_S", "STEP_BOUNDS_S", "Histogram"]

STEP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
)  # fmt: skip
CHECKPOINT_BOUNDS_S = (
    0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0,
)  # fmt: skip
RECOVERY_BOUNDS_S = (
    0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many durations fell into each bucket.

    Attributes:
        bounds_s: upper ends of the buckets, inclusive; one more has no upper end.
        counts: per bucket, not added up; one longer than ``bounds_s``.
        sum_s: all durations together.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float = 0.0

    @classmethod
    def empty(cls, bounds_s: tuple[float, ...]) -> Histogram:
        """Nothing observed yet."""
        return cls(bounds_s=bounds_s, counts=(0,) * (len(bounds_s) + 1))

    @property
    def count(self) -> int:
        """How many durations were observed."""
        return sum(self.counts)

    @property
    def longest_s(self) -> float:
        """No duration was longer, as far as the buckets tell; 0 without any."""
        filled = [at for at, count in enumerate(self.counts) if count]
        if not filled or filled[-1] >= len(self.bounds_s):
            return self.sum_s
        return min(self.sum_s, self.bounds_s[filled[-1]])

    def observe(self, seconds: float, times: int = 1) -> Histogram:
        """The histogram after ``times`` durations of ``seconds`` each."""
        if times < 1 or not seconds >= 0:  # NaN is not >= 0 either
            return self
        at = bisect.bisect_left(self.bounds_s, seconds)
        counts = (*self.counts[:at], self.counts[at] + times, *self.counts[at + 1 :])
        return Histogram(
            bounds_s=self.bounds_s, counts=counts, sum_s=self.sum_s + seconds * times
        )
