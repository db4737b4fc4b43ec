"""Whether the last lines of a failed program say that memory ran out, and which.

Covers: the answer that a supervisor acts on: only what says so by itself, or with
another line beside it. Does not cover: the lines (``log_forms``), a log of which more
is known, where a guess is worth something, too (``judging``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomrun.core import judging_text
from oomrun.core.causes import Cause

__all__ = ["Exhaustion", "find_exhaustion", "looks_like_device_oom"]

Memory = Literal["device", "host"]

_SURE = 0.7  # below this it is a guess: a restart would change what may not be to blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustion:
    """Which memory ran out, and the line that says so."""

    memory: Memory
    line: str


def find_exhaustion(text: str) -> Exhaustion | None:
    """The error in ``text`` that says that memory ran out, or None.

    Only for output of a program that has ended and failed: while one lives, a line like
    these may be followed by its next step.
    """
    found = judging_text.from_text(text)
    if found is None or not found.is_oom or found.confidence < _SURE:
        return None
    if found.cause not in (Cause.DEVICE_OOM, Cause.HOST_OOM):
        return None
    # TensorFlow's CPU device with a limit is a device, too.
    memory: Memory = "device" if found.cause is Cause.DEVICE_OOM else "host"
    return Exhaustion(memory=memory, line=found.told)


def looks_like_device_oom(text: str) -> bool:
    """Whether ``text`` says that a device's memory ran out."""
    found = find_exhaustion(text)
    return found is not None and found.memory == "device"
