"""What a device may use, and what a plan is predicted to use.

Covers: limits and budgets; a prediction, as an interval, from what is known of a model.
Does not cover: how that is learnt (``worker/probing.py``), which size is tried next
(``probing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from oomrun.core import convolutions
from oomrun.core.recorded import Recorded

__all__ = ["MemoryModel", "Peak", "budget_bytes", "largest", "limit_grew", "peak_of"]

# How far the upper end of a prediction lies above the most likely value, as a fraction
# of what depends on the micro-batch. Measured on the models of ``benchmarks/zoo``.
#: A size that ran, with its operations in one order, or as the executor happened to.
_SAME = {True: 0.03, False: 0.05}
#: What is added to what ran, for each byte that lies between it and another size.
_SLOPE = {True: 0.25, False: 0.5}
#: A rise this much above what the graph says is a jump.
_JUMP = 1.5
#: TensorFlow's allocator hands out a free piece whole where it has less than twice
#: what was asked for, and counts all of it. What a peak rose by beyond this much of
#: what the graph says is that, where operations run in one order.
_WASTE = 1.5
#: Sizes of which the larger one's waste is the smaller one's, too.
_CLOSE = 0.9
#: So much below a pool's limit all of it may be handed out: a convolutional network
#: that needs 96 MiB was counted as 98 in one step and as 122 of 125 in another.
_NEARLY = 1.3
#: From the graph alone, of which real steps took up to 2.1 times as much. In order it
#: is what the graph says, and the workspace of one operation: buffers of about the size
#: of the processor's last cache, in TensorFlow's convolutions.
_STATIC, _STATIC_IN_ORDER, _WORKSPACE = 1.3, 0.2, 72 * 2**20
#: A loop keeps what its backward pass needs of every turn, and the graph shows one:
#: recurrent layers over 24 and 32 steps took 5 times what it says.
_STATIC_LOOPS = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A predicted peak, in bytes: the most likely value and the upper end."""

    bytes: int
    high_bytes: int


def peak_of(likely_bytes: int | None, high_bytes: int | None) -> Peak | None:
    """The peak that two numbers of a plan or an event are; None where there is none."""
    if likely_bytes is None:
        return None
    high = likely_bytes if high_bytes is None else high_bytes
    return Peak(bytes=likely_bytes, high_bytes=high)


def largest(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest size that fits, where all below one that does fit too; or 0."""
    good, bad = 0, at_most + 1
    while bad - good > 1:
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size) else (good, size)
    return good


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


Point = tuple[int, int]  # samples a pass, bytes of the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What is known of a model's memory, in bytes.

    Attributes:
        state_bytes: the peak at no samples: weights, gradients, optimizer slots, what
            the script holds on the device.
        measured: the peak of a step by micro-batch size, the highest seen.
        static: what the step's graph says of its peak, by micro-batch size, without
            what is in use between steps.
        in_order: whether a step's operations run one at a time, so that its peak is
            always the same; otherwise their order is left to chance.
        loops: whether the graph has loops, as recurrent layers have.
        recorded: what the allocations of steps have told, where they were recorded,
            and the buffers that operations take beside what the graph shows.
    """

    state_bytes: int | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    static: Mapping[int, int] = field(default_factory=dict)
    in_order: bool = False
    loops: bool = False
    recorded: Recorded = field(default_factory=Recorded)

    @property
    def needed(self) -> dict[int, int]:
        """``measured`` without what the allocator handed out beyond what was asked for.

        Such a size has run, and will again; the other sizes follow from what it needs.
        Where its allocations were recorded it is the least pool with room for them.
        """
        found: dict[int, int] = dict(self.recorded.pools)
        if not self.in_order or self.loops or not self.static:
            return {**self.measured, **found}
        for size, peak in sorted(self.measured.items()):
            if size in found:
                continue
            bounds = (
                less + _WASTE * (self._static_at(size) - self._static_at(smaller))
                for smaller, less in found.items()
                if smaller < size
            )
            found[size] = int(min([peak, *bounds]))
        return found

    def predict(self, micro_batch_size: int) -> Peak | None:
        """The peak of a step at ``micro_batch_size``; None where nothing is known.

        A size that was measured predicts itself, less what it did not need. From there
        to another the peak rises as the graph's own figures do, or the line through two
        sizes that were measured, whichever is steeper: a library's workspace does not
        grow with the batch, so that the line through small sizes is too flat for large
        ones. Where nothing was measured, the graph's figures stand for themselves.
        """
        size, needed = micro_batch_size, self.needed
        recorded = self.recorded.predict(size)
        if recorded is not None:
            return Peak(bytes=recorded[0], high_bytes=recorded[1])
        rest = min([self.state_bytes or 0, *needed.values()])
        if size in needed:
            return _peak(needed[size], rest, _SAME[self.in_order])
        if not needed:
            if not self.static or self.state_bytes is None:
                return None
            return self._from_graph(size, rest)
        points = sorted(needed.items())
        below = max((p for p in points if p[0] < size), default=None)
        above = min((p for p in points if p[0] > size), default=None)
        if below is None:
            assert above is not None
            return self._smaller(size, above, rest)
        if above is not None:
            return self._between(size, below, above, rest)
        return self._larger(size, points, rest)

    def counted(
        self, micro_batch_size: int, limit_bytes: int | None = None
    ) -> Peak | None:
        """The peak that TensorFlow will tell of such a step: what it needs, and waste.

        Args:
            micro_batch_size: samples a pass.
            limit_bytes: of the allocator's pool, where it has one.
        """
        peak = self.predict(micro_batch_size)
        if peak is None:
            return None
        likely, high = peak.bytes, peak.high_bytes
        replayed = self.recorded.handed_out(micro_batch_size)
        known = micro_batch_size in self.recorded.pools or replayed is not None
        if known:
            likely = self.measured.get(micro_batch_size, replayed or likely)
            high = max(high, likely)
        ran = min((m for m in self.measured if m >= micro_batch_size), default=0)
        above = self.measured.get(ran, 0)
        if above > high:
            # That one took more than it needed: so will the sizes close to it, and may
            # all that are smaller.
            high = above
            likely = above if micro_batch_size >= _CLOSE * ran else likely
        exact = self.in_order or known
        if limit_bytes is not None and exact and high * _NEARLY >= limit_bytes:
            high = max(high, limit_bytes)
        return Peak(bytes=likely, high_bytes=high)

    def _from_graph(self, size: int, rest: int) -> Peak:
        """Where nothing was measured."""
        needed = self._static_at(size)
        high = needed * (1 + (_STATIC_LOOPS if self.loops else _STATIC))
        if self.in_order:
            high = min(high, needed * (1 + _STATIC_IN_ORDER) + _WORKSPACE)
        buffers = self.recorded.buffers
        rest += convolutions.bytes_at(buffers, size, in_order=self.in_order)
        return Peak(bytes=int(rest + needed), high_bytes=int(rest + high))

    def _between(self, size: int, below: Point, above: Point, rest: int) -> Peak:
        """Between two sizes that ran."""
        rise = max(0, above[1] - below[1])
        share = (size - below[0]) / (above[0] - below[0])
        peak = _peak(int(below[1] + rise * share), rest, _SAME[self.in_order])
        if self.static:
            expected = self._static_at(above[0]) - self._static_at(below[0])
            if rise > _JUMP * expected:
                # It has jumped, by a buffer more: somewhere between the two.
                return replace(peak, high_bytes=max(peak.high_bytes, above[1]))
        return peak

    def _larger(self, size: int, points: Sequence[Point], rest: int) -> Peak:
        """Above all sizes that ran."""
        ran, peak = points[-1]
        slopes = [0.0]
        if len(points) > 1:
            before, less = points[-2]
            slopes.append((peak - less) / (ran - before))
        if self.static:
            more = self._static_at(size) - self._static_at(ran)
            # Where the order is left to chance more is in use than the graph needs.
            usual = 1.0 if self.in_order else (peak - rest) / self._static_at(ran)
            slopes.append(max(1.0, usual) * more / (size - ran))
        elif len(points) == 1:
            slopes.append((peak - rest) / ran)
        rise = max(slopes) * (size - ran)
        buffers = self.recorded.buffers
        peak += convolutions.more_bytes(buffers, size, ran, in_order=self.in_order)
        sure = peak * (1 + _SAME[self.in_order])
        return Peak(
            bytes=int(peak + rise),
            high_bytes=int(sure + rise * (1 + _SLOPE[self.in_order])),
        )

    def _smaller(self, size: int, above: Point, rest: int) -> Peak:
        """Below all sizes that ran."""
        ran, peak = above
        likely = rest + (peak - rest) * size / ran
        if self.static:
            likely = peak - (self._static_at(ran) - self._static_at(size))
        # Whatever it is, it is less than what ran.
        middle = int(min(max(likely, rest), peak))
        return Peak(bytes=middle, high_bytes=int(middle + (peak - middle) / 2))

    def largest_within(
        self, budget_bytes: int, at_most: int, *, tried: bool = True
    ) -> int:
        """The largest size whose upper end is within the budget; 0 where none is.

        Args:
            budget_bytes: what we plan into.
            at_most: the upper bound.
            tried: whether it is tried before it is trained with.
        """
        size = largest(lambda size: self.fits(size, budget_bytes, tried=tried), at_most)
        return self.recorded.less_crowded(size)

    def fits(self, size: int, budget_bytes: int, *, tried: bool = True) -> bool:
        """Whether a step surely fits into a budget, as far as is known."""
        recorded = self.recorded.fits(size, budget_bytes, tried=tried)
        if recorded is not None:
            return recorded
        peak = self.predict(size)
        return peak is not None and peak.high_bytes <= budget_bytes

    def _static_at(self, size: int) -> float:
        """The graph's peak at ``size``, along the lines between its figures."""
        points = sorted(self.static.items())
        if len(points) == 1:
            ((at, peak),) = points
            return peak * size / at
        pair = next((p for p in pairwise(points) if size < p[1][0]), points[-2:])
        (below, low), (above, high) = pair
        return max(1.0, low + (high - low) / (above - below) * (size - below))


def _peak(peak: int, rest: int, spread: float) -> Peak:
    return Peak(bytes=peak, high_bytes=int(peak + max(0, peak - rest) * spread))
