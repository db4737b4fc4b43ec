"""A worker does not outlive its supervisor.

Covers: the kernel's parent-death signal, and ending our whole process group when the
supervisor's end of the channel closes. The first is immediate but reaches only this
process; the second takes the script's own child processes along.
"""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent", "end_group"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent_pid: int | None) -> None:
    """Has the kernel kill this process when its parent ends.

    The signal is SIGTERM's stronger sibling: nothing that the script installs can
    ignore it. A parent that died before this call is noticed by its changed pid.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux: the channel's closing remains
    if parent_pid is not None and os.getppid() != parent_pid:
        end_group()


def end_group() -> None:
    """Kills our own process group, this process included. Does not return."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
