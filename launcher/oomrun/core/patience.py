"""How long a worker may say nothing before it counts as hanging.

Covers: ``silence_s``, a function of what the job file says and of what the attempt has
shown so far. Does not cover: waiting, and what is done then (``oomrun.attempts``).
"""

from __future__ import annotations

from oomrun.core.spec import Auto

__all__ = ["silence_s"]

#: So many times the longest silence so far, and never less than half an hour: a script
#: may do for long at an epoch's end what it did not do before.
_TIMES = 20.0
_LEAST_S = 1800.0


def silence_s(
    hang_after: Auto | float | None, *, of_group: bool, longest_s: float | None
) -> float | None:
    """Seconds without a word after which a worker counts as hanging; None: never.

    A single worker waits for nobody, so by itself it is never taken to hang. In a group
    one that has stopped makes all others wait, for as long as the transport lets them.

    Args:
        hang_after: what the job file says; seconds, or None for never.
        of_group: whether the attempt has several workers.
        longest_s: the longest silence in training so far; None before the first step.
    """
    if hang_after is None or isinstance(hang_after, float):
        return hang_after
    if not of_group or longest_s is None:
        return None
    return max(_LEAST_S, _TIMES * longest_s)
