"""What one step asked its allocator for, and what steps of other sizes will.

Covers: ``Recording``; the same for another micro-batch; the bytes that it needs, the
pool in which it has room, and the peak that TensorFlow would tell of it there. Does not
cover: how it is recorded (``worker/engine/recording.py``), the rules of the allocator
(``allocator.py``).

A tensor of a pass has as many rows as the pass has samples, so its bytes are a multiple
of them; those of weights, gradients and sums are not, if the number of samples is a
prime that no weight is a multiple of. So one recording tells the two apart, and says
what any other size asks for. Only the workspace of some operations follows other rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from oomrun.core.allocator import GRAIN, Pool, rounded

__all__ = [
    "FREE", "HELD", "Recording", "at_size", "fits", "least_pool", "needed_bytes",
    "played", "pool_peak", "squeezed", "telling_size", "with_more",
]  # fmt: skip

#: How near the least pool is searched for.
_NEAR = 0.003
#: How far above what is needed it is looked for first, as a part of it, and how much
#: further each time; a pool of four times that has room however it is split.
_ABOVE, _FURTHER, _ROOMY = 0.03, 4, 3
#: Smaller primes divide too much.
_LEAST_PRIME = 5
#: The last pass of a batch does not decide if it has no more than this share of a pass.
_LAST_PASS = 0.6
#: What a piece of a layout is, where it is no early request.
HELD, FREE = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The allocations of one step, in bytes and in order.

    Attributes:
        size: samples of a pass.
        layout: the pool from below as the step began: the bytes of each piece, and
            ``HELD``, where it was in use all along, ``FREE``, or the place in
            ``requests`` of an early one. Above the last piece all was free.
        early: how many of ``requests`` were in use as it began, and were freed in it.
        requests: bytes that were asked for; the early ones first.
        moves: of the allocator: the place in ``requests`` of what it handed out, or the
            complement of it (``~place``) where that was freed.
        telling: whether a multiple of ``size`` is a tensor of a pass.
    """

    size: int
    layout: tuple[tuple[int, int], ...]
    early: int
    requests: tuple[int, ...]
    moves: tuple[int, ...]
    telling: bool = False


def telling_size(
    wanted: int, rows: int, lengths: Iterable[int], below: float = 0.0
) -> int | None:
    """The next smaller prime that none of ``lengths`` is a multiple of.

    The last pass over a batch has the rows that are left. If they are nearly as many as
    the others have, its tensors decide too, and are no multiples: such a size tells
    nothing.

    Args:
        wanted: samples of a pass.
        rows: of the batch.
        lengths: numbers of elements of what does not grow with the pass: weights.
        below: the least that is good enough, as a share of what is wanted.

    Returns:
        None where there is none that is large enough.
    """
    lengths = tuple(lengths)
    least = max(_LEAST_PRIME, math.ceil(wanted * below))
    for size in range(wanted, least - 1, -1):
        prime = all(size % divisor for divisor in range(2, int(size**0.5) + 1))
        if rows % size > size * _LAST_PASS:
            continue
        if prime and all(length % size for length in lengths):
            return size
    return None


def at_size(recording: Recording, size: int) -> Recording:
    """What a step of ``size`` samples a pass will ask for.

    Args:
        recording: a telling one.
        size: samples of a pass.
    """
    before, early = recording.size, recording.early
    later = (
        n if n % before else n // before * size for n in recording.requests[early:]
    )
    requests = (*recording.requests[:early], *later)
    return replace(recording, size=size, requests=requests)


def with_more(recording: Recording, held_bytes: int) -> Recording:
    """The same step where so many bytes more are in use all along."""
    if not held_bytes:
        return recording
    return replace(recording, layout=(*recording.layout, (held_bytes, HELD)))


def needed_bytes(recording: Recording) -> int:
    """The most bytes that the step has asked for at one time."""
    begin = sum(length for length, what in recording.layout if what != FREE)
    lengths = [rounded(n) for n in recording.requests]
    changes = (lengths[n] if n >= 0 else -lengths[~n] for n in recording.moves)
    return max(accumulate(changes, initial=begin))


def pool_peak(recording: Recording, pool_bytes: int) -> int | None:
    """The most bytes that a pool would have handed out; None where it would run out."""
    peak = None
    for pool in played(recording, pool_bytes):
        peak = pool.peak if pool is not None else None
    return peak


def played(recording: Recording, pool_bytes: int) -> Iterator[Pool | None]:
    """The pool as the step begins, and after each move; None, at last: it ran out.

    Where it is smaller than what lay in the pool that was recorded, with what was free
    in between, there is as much less between.
    """
    pool = Pool(pool_bytes // GRAIN * GRAIN)
    places: dict[int, int] = {}
    holes: list[int] = []
    for length, what in squeezed(recording.layout, pool_bytes):
        address = pool.allocate(length, exactly=True)
        if address is None:
            yield None
            return
        if what == FREE:
            holes.append(address)
        elif what != HELD:
            places[what] = address
    for hole in holes:
        pool.free(hole)
    pool.peak = pool.in_use
    yield pool
    for move in recording.moves:
        if move < 0:
            pool.free(places.pop(~move))
            yield pool
            continue
        address = pool.allocate(recording.requests[move])
        if address is None:
            yield None
            return
        places[move] = address
        yield pool


def squeezed(
    layout: tuple[tuple[int, int], ...], pool_bytes: int
) -> Iterable[tuple[int, int]]:
    """``layout`` with what is free in it cut down from above, to fit into the pool."""
    # Gaps between addresses are no multiples of what the allocator counts in.
    layout = tuple((rounded(length), what) for length, what in layout)
    excess = sum(length for length, _ in layout) - pool_bytes
    if excess <= 0:
        return layout
    found: list[tuple[int, int]] = []
    for length, what in reversed(layout):
        cut = min(length, rounded(excess)) if what == FREE and excess > 0 else 0
        excess -= cut
        if length > cut:
            found.append((length - cut, what))
    return reversed(found)


def fits(recording: Recording, pool_bytes: int) -> bool:
    """Whether a pool has room for the step."""
    enough = needed_bytes(recording) <= pool_bytes  # known in a tenth of the time
    return enough and pool_peak(recording, pool_bytes) is not None


@lru_cache(maxsize=64)  # to play a step to a pool takes 0.03 s
def least_pool(recording: Recording) -> int:
    """Bytes of the smallest pool that has room for the step.

    More than it needs, since what is free lies in pieces. (In chance cases a larger
    pool has no room although a smaller one has: one such border is found.)
    """
    needed = needed_bytes(recording)
    low, above = needed - 1, _ABOVE
    while above < _ROOMY and not fits(recording, int(needed * (1 + above))):
        low, above = int(needed * (1 + above)), above * _FURTHER
    high = int(needed * (1 + min(above, _ROOMY)))
    while high - low > max(1, _NEAR * low):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(recording, middle) else (middle, high)
    return high
