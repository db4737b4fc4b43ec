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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from oomrun.core.allocator import Pool, rounded

__all__ = [
    "Recording", "at_size", "fits", "fits_wherever", "least_pool", "needed_bytes",
    "pool_peak", "telling_size",
]  # fmt: skip

#: How near the least pool is searched for.
_NEAR = 0.003
#: A pool this many times as large as what is needed has room however it is split.
_ROOMY = 3
#: Smaller primes divide too much.
_LEAST_PRIME = 5
#: The last pass of a batch does not decide if it has no more than this share of a pass.
_LAST_PASS = 0.6
#: Where in the free part of a pool a batch of the data may lie.
_PLACES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The allocations of one step, in bytes and in order.

    Attributes:
        size: samples of a pass.
        held_bytes: in use as the step began, and not freed in it.
        early: how many of ``requests`` were in use as it began, and were freed in it.
        requests: bytes that were asked for; the early ones first.
        moves: of the allocator: the place in ``requests`` of what it handed out, or the
            complement of it (``~place``) where that was freed.
        telling: whether a multiple of ``size`` is a tensor of a pass.
        batch_bytes: of ``held_bytes``, one batch of the data.
    """

    size: int
    held_bytes: int
    early: int
    requests: tuple[int, ...]
    moves: tuple[int, ...]
    telling: bool = False
    batch_bytes: int = 0


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
    before = recording.size
    requests = (n if n % before else n // before * size for n in recording.requests)
    return replace(recording, size=size, requests=tuple(requests))


def needed_bytes(recording: Recording) -> int:
    """The most bytes that the step has asked for at one time."""
    lengths = [rounded(n) for n in recording.requests]
    begin = recording.held_bytes + sum(lengths[: recording.early])
    changes = (lengths[n] if n >= 0 else -lengths[~n] for n in recording.moves)
    return max(accumulate(changes, initial=begin))


def pool_peak(recording: Recording, pool_bytes: int) -> int | None:
    """The most bytes that a pool would have handed out; None where it would run out.

    What was in use as the step began is taken to lie in one piece.
    """
    pool = _pool(recording, pool_bytes, None)
    return None if pool is None else _replayed(recording, pool)


def _pool(recording: Recording, pool_bytes: int, place: float | None) -> Pool | None:
    """The pool as the step begins; None where it is too small for that.

    Args:
        recording: of the step.
        pool_bytes: of the pool.
        place: where in what is free a batch of the data lies; None: beside the rest.
    """
    pool = Pool(pool_bytes)
    apart = 0 if place is None else min(recording.batch_bytes, recording.held_bytes)
    held = recording.held_bytes - apart
    if held and pool.allocate(held, exactly=True) is None:
        return None
    if place is None:
        return pool
    below = pool.allocate(int((pool_bytes - pool.in_use) * place), exactly=True)
    if below is None or pool.allocate(apart, exactly=True) is None:
        return None
    pool.free(below)
    pool.peak = pool.in_use
    return pool


def _replayed(recording: Recording, pool: Pool) -> int | None:
    """The peak of the step in a pool; None where it runs out."""
    places: dict[int, int] = {}
    for move in (*range(recording.early), *recording.moves):
        if move < 0:
            pool.free(places.pop(~move))
            continue
        address = pool.allocate(recording.requests[move])
        if address is None:
            return None
        places[move] = address
    return pool.peak


def fits(recording: Recording, pool_bytes: int) -> bool:
    """Whether a pool has room for the step."""
    return pool_peak(recording, pool_bytes) is not None


def fits_wherever(recording: Recording, pool_bytes: int) -> bool:
    """Whether there is room wherever a batch of the data lies.

    Data are read while a step runs, and lie where there was room in that moment. Once
    the step has freed its own, they may lie in the middle of what is free.
    """
    if not recording.batch_bytes:
        return fits(recording, pool_bytes)
    pools = (_pool(recording, pool_bytes, place) for place in _PLACES)
    return all(p is not None and _replayed(recording, p) is not None for p in pools)


def least_pool(recording: Recording) -> int:
    """Bytes of the smallest pool that has room for the step.

    More than it needs, since what is free lies in pieces. (In chance cases a larger
    pool has no room although a smaller one has: one such border is found.)
    """
    low = needed_bytes(recording) - 1
    high = _ROOMY * (low + 1)
    while high - low > max(1, _NEAR * low):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(recording, middle) else (middle, high)
    return high
