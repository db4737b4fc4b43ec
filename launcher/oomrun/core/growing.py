"""Going back to a larger micro-batch once the memory it lost is free again.

Covers: ``lost``, whether something else took the memory that a micro-batch had run
with, and ``at_checkpoint``, whether it has been back for long enough. Pure functions.
Does not cover: a restart with more memory, whose plan forgets what failed
(``state_memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Lost", "at_checkpoint", "lost"]

#: Less than this share of the budget more in use between steps is no one else's.
_SLACK = 0.02
#: A step that failed with less than this share of what it takes had a neighbour on
#: the device.
_REFUSED = 0.9
#: Checkpoints at which memory must have been back, one after the other: the first
#: time, and at most.
_WAIT, _LONGEST = 2, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A micro-batch that ran until its memory was taken.

    Attributes:
        size: samples a pass.
        rest_bytes: in use between steps when it last ran.
        slack_bytes: so much more is still as before.
        wait: checkpoints at which memory must have been back.
        seen: at how many of them it has been, up to now.
    """

    size: int
    rest_bytes: int
    slack_bytes: int
    wait: int = _WAIT
    seen: int = 0

    @property
    def back(self) -> bool:
        """Whether it can be taken again."""
        return self.seen >= self.wait


def lost(
    size: int,
    *,
    rest_bytes: int,
    in_use_bytes: int,
    budget_bytes: int,
    refused_at_bytes: int | None = None,
    takes_bytes: int | None = None,
    before: Lost | None = None,
) -> Lost | None:
    """What to wait for after ``size`` samples a pass, which had run, ran out of memory.

    None where nothing says that something else took the memory: longer sequences
    would come again.

    Args:
        size: the micro-batch that failed.
        rest_bytes: in use between steps when it last ran.
        in_use_bytes: in use after it failed, its own tensors gone.
        budget_bytes: what a step's peak must not exceed.
        refused_at_bytes: on a device that others use too, the most that was in use
            when it failed.
        takes_bytes: its peak when it ran.
        before: what was waited for the last time: where that was too early, the next
            wait is twice as long.
    """
    slack = int(_SLACK * budget_bytes)
    taken = in_use_bytes - rest_bytes > slack
    refused = (
        refused_at_bytes is not None
        and takes_bytes is not None
        and refused_at_bytes < _REFUSED * takes_bytes
    )
    if not (taken or refused):
        return None
    again = before is not None and before.size == size
    wait = min(_LONGEST, 2 * before.wait) if before is not None and again else _WAIT
    return Lost(size=size, rest_bytes=rest_bytes, slack_bytes=slack, wait=wait)


def at_checkpoint(waiting: Lost, in_use_bytes: int) -> Lost:
    """``waiting`` with one more look, at what is in use between steps now."""
    free = in_use_bytes <= waiting.rest_bytes + waiting.slack_bytes
    return replace(waiting, seen=waiting.seen + 1 if free else 0)
