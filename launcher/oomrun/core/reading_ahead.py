"""Whether a step has room beside the next batch of the data.

On a CPU device the data lie in the pool from which a step is served, and the next batch
is read as soon as the one before was pulled. It is given the best place that is free
then: there it lies while the step runs, and may split what the step needs in one piece.
"""

from __future__ import annotations

from dataclasses import replace

from oomrun.core.allocations import FREE, HELD, Recording, fits, played, squeezed
from oomrun.core.allocator import GRAIN

__all__ = ["LESS_CROWDED", "is_crowded"]

#: So much of a crowded size is looked at next: holes lie elsewhere at each size.
LESS_CROWDED = 0.93
#: A step whose least pool is no more of the device's has room wherever the data lie.
_ROOMY = 0.8


def is_crowded(recording: Recording, pool_bytes: int, batch_bytes: int) -> bool:
    """Whether a step has no room where the next batch was read before it began.

    Args:
        recording: of the step.
        pool_bytes: of the device's pool.
        batch_bytes: of the batch.
    """
    if not batch_bytes or fits(recording, int(pool_bytes * _ROOMY)):
        return False
    at_rest = next(played(recording, pool_bytes))
    piece = at_rest.piece_for(batch_bytes) if at_rest is not None else None
    if piece is None:
        return True
    return not fits(_with_batch_in(piece, recording, pool_bytes), pool_bytes)


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
