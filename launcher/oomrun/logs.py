"""What the output of attempts tells of how they ended.

Covers: its last lines, and whether two attempts have said the same. Does not cover:
what the lines mean (``core.judging``).
"""

from __future__ import annotations

import filecmp
import os
from dataclasses import replace
from pathlib import Path

from oomrun.core.diagnosis import Evidence

__all__ = ["of_command", "tail"]

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
