"""Whether a step has room wherever the next batch of the data comes to lie.

On a CPU device the data lie in the pool from which a step is served, and the next batch
is read while a step runs: it is given the best place that is free at that moment, in
the midst of what the step's tensors come and go from. There it lies when the next step
begins. Measured: of two sizes of one model, whose least pools were 0.88 and 0.92 of the
device's, one left room behind 93 % of the moments at which a batch may have come, and
trained; the other behind none, and ran out of memory in its fourth step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from oomrun.core.allocations import FREE, HELD, Recording, fits, played, squeezed
from oomrun.core.allocator import GRAIN

__all__ = ["LESS_CROWDED", "is_crowded", "share_without_room"]

#: So much of a crowded size is looked at next: holes lie elsewhere at each size.
LESS_CROWDED = 0.93
#: A size is not trained with where this share of a step's moments is a bad one to read
#: the next batch. Measured: five models trained 20 steps with 0.16 at most, of those of
#: 0.5 and more some ran out of memory.
_BAD_MOMENTS = 0.25
#: A step whose least pool is no more of the device's has room wherever the data lie.
_ROOMY = 0.8
#: So many pieces are tried, those that a batch is given most often.
_PIECES = 8


def is_crowded(recording: Recording, pool_bytes: int, batch_bytes: int) -> bool:
    """Whether the next batch is likely to come to lie where it leaves no room.

    Args:
        recording: of a step.
        pool_bytes: of the device's pool.
        batch_bytes: of the batch.
    """
    if not batch_bytes or fits(recording, int(pool_bytes * _ROOMY)):
        return False
    return share_without_room(recording, pool_bytes, batch_bytes) > _BAD_MOMENTS


def share_without_room(
    recording: Recording, pool_bytes: int, batch_bytes: int
) -> float:
    """The share of a step's moments after which no later step would have room.

    Args:
        recording: of the step.
        pool_bytes: of the device's pool.
        batch_bytes: of the batch that is read at such a moment.

    Returns:
        Of the moments whose pieces were tried; 1.0 where the step itself has no room.
    """
    pieces: Counter[tuple[int, int]] = Counter()
    for pool in played(recording, pool_bytes):
        if pool is None:
            return 1.0
        piece = pool.piece_for(batch_bytes)
        if piece is not None:  # it waits until there is one
            pieces[piece] += 1
    tried = pieces.most_common(_PIECES)
    bad = sum(
        moments
        for piece, moments in tried
        if not fits(_with_batch_in(piece, recording, pool_bytes), pool_bytes)
    )
    return bad / max(1, sum(moments for _, moments in tried))


def _with_batch_in(
    piece: tuple[int, int], recording: Recording, pool_bytes: int
) -> Recording:
    """``recording`` where a batch lies in ``piece`` as the step begins.

    Not so where something else then lies there, which the step takes away.
    """
    place, wanted = piece
    layout: list[tuple[int, int]] = []
    begin = 0
    for length, what in _whole(recording, pool_bytes):
        end = begin + length
        if what == FREE and begin <= place and place + wanted <= end:
            layout += _split(begin, end, place, wanted)
        else:
            layout.append((length, what))
        begin = end
    return replace(recording, layout=tuple(layout))


def _whole(recording: Recording, pool_bytes: int) -> list[tuple[int, int]]:
    """The layout up to the pool's end, with free neighbours as one."""
    found: list[tuple[int, int]] = []
    pieces = [*squeezed(recording.layout, pool_bytes)]
    above = (pool_bytes - sum(length for length, _ in pieces)) // GRAIN * GRAIN
    for length, what in (*pieces, (above, FREE)):
        if what == FREE and found and found[-1][1] == FREE:
            length += found.pop()[0]
        if length:
            found.append((length, what))
    return found


def _split(begin: int, end: int, place: int, wanted: int) -> list[tuple[int, int]]:
    """What was free from ``begin`` to ``end``, with so much in use at ``place``."""
    after = place + wanted
    found = [(place - begin, FREE), (wanted, HELD), (end - after, FREE)]
    return [(length, what) for length, what in found if length > 0]
