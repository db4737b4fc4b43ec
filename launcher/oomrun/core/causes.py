"""Why an attempt ended, in one word."""

from __future__ import annotations

import enum

__all__ = ["Cause"]


class Cause(str, enum.Enum):
    """Why an attempt ended. The value is the word in the journal and in metrics."""

    FINISHED = "finished"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    LEAK = "leak"
    SHM_FULL = "shm_full"
    DISK_FULL = "disk_full"
    GRAPH_LIMIT = "graph_limit"
    MESSAGE_LIMIT = "message_limit"
    CRASH = "crash"
    KILLED = "killed"
    PREEMPTION = "preemption"
    HANG = "hang"
    MISCONFIGURATION = "misconfiguration"

    @property
    def of_the_program(self) -> bool:
        """The program failed for something that less memory does not mend."""
        return self in _OF_THE_PROGRAM

    @property
    def budget(self) -> str:
        """What its restarts count as; a key of ``recovery.max_restarts``, if any."""
        if self in (Cause.DEVICE_OOM, Cause.HOST_OOM):
            return "oom"
        if self in (Cause.PREEMPTION, Cause.HANG, Cause.LEAK):
            return str(self.value)
        return "crash"


_OF_THE_PROGRAM = frozenset(
    {
        Cause.CRASH,
        Cause.SHM_FULL,
        Cause.DISK_FULL,
        Cause.GRAPH_LIMIT,
        Cause.MESSAGE_LIMIT,
    }
)
