"""What the output of attempts tells of how they ended.

Covers: its last lines, and whether two attempts have said the same. Does not cover:
what the lines mean (``core.judging``).
"""

from __future__ import annotations

import filecmp
import os
from dataclasses import replace
from pathlib import Path

from oomrun.core import events as ev
from oomrun.core.diagnosis import Evidence
from oomrun.core.plan import DevicePlan

__all__ = ["of_command", "of_exhausted", "tail"]

_LOG_TAIL_BYTES = 64 * 1024


def of_command(evidence: Evidence, device: str, log: Path, before: Path) -> Evidence:
    """The evidence of an attempt of a command, whose exit is all it reports.

    Args:
        evidence: what was seen of its end.
        device: what it was given.
        log: its output.
        before: the output of the attempt before; it may not be there.
    """
    return replace(
        evidence, command=True, device=device, repeated=_same_output(log, before)
    )


def of_exhausted(
    at: float, attempt: int, device: DevicePlan, told: str
) -> ev.OomOccurred:
    """What a command would have reported of memory that ran out, had it been ours.

    Args:
        at: when.
        attempt: which one.
        device: what it was given.
        told: the line of its output that says so.
    """
    return ev.OomOccurred(
        at=at,
        attempt=attempt,
        rank=0,
        device=device.id,
        kind="device",
        phase="unknown",
        recovery="restart",
        micro_batch_size=device.micro_batch_size,
        step=0,
        message=told,
    )


def _same_output(log: Path, before: Path) -> bool:
    """Whether both said the same; programs that say nothing may have done anything."""
    try:
        return os.path.getsize(log) > 0 and filecmp.cmp(log, before, shallow=False)
    except OSError:
        return False


def tail(log: Path) -> str:
    """The last of a worker's output."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
