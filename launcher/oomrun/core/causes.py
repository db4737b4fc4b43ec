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
    def budget(self) -> str:
        """What its restarts count as; a key of ``recovery.max_restarts``, if any."""
        if self in (Cause.DEVICE_OOM, Cause.HOST_OOM, Cause.SHM_FULL):
            return "oom"
        if self in (Cause.PREEMPTION, Cause.HANG, Cause.LEAK):
            return str(self.value)
        return "crash"
