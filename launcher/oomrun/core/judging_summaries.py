"""The cause and the sentence for each kind of failure that a log tells.

Covers: causes, summaries, the limits that a line names. Does not cover: which kind it
is (``judging_text``, ``judging_end``), the facts in the sentence (``remedies``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from oomrun.core import units
from oomrun.core.causes import Cause
from oomrun.core.log_form import Kind

__all__ = ["CAUSES", "FILE_SIZE", "SUMMARIES", "summary_of"]

CAUSES: Mapping[str, Cause] = {
    "host_allocator": Cause.HOST_OOM,
    "host_killed": Cause.HOST_OOM,
    "shm": Cause.SHM_FULL,
    "disk": Cause.DISK_FULL,
    "protobuf_limit": Cause.GRAPH_LIMIT,
    "grpc": Cause.MESSAGE_LIMIT,
    "device_fault": Cause.CRASH,
    "hardware": Cause.CRASH,
    "peer_lost": Cause.CRASH,
    "hang": Cause.HANG,
    "preemption": Cause.PREEMPTION,
    "misconfiguration": Cause.MISCONFIGURATION,
    "crash": Cause.CRASH,
    "threads": Cause.CRASH,
    "no_capacity": Cause.MISCONFIGURATION,
}
SUMMARIES: Mapping[str, str] = {
    "gpu_allocator": "the device ran out of memory",
    "gpu_context": "the device had no memory left",
    "gpu_library": "a CUDA library found no memory on the device",
    "gpu_async_allocator": "the device ran out of memory (cuda_malloc_async)",
    "xla": "the device ran out of memory in a program that XLA compiled",
    "nccl": "NCCL found no memory on the device for its buffers",
    "host_allocator": "host memory ran out",
    "host_killed": "a process was killed since host memory ran out",
    "shm": "shared memory (/dev/shm) is full",
    "disk": "the disk is full, or a quota is used up",
    "protobuf_limit": "a graph, constant or message is above the limit of protobuf",
    "grpc": "a message is above gRPC's limit on its size",
    "device_fault": "the device or a kernel on it failed; memory did not run out",
    "hardware": "the device's hardware failed: leave it out until it was looked at",
    "peer_lost": "another process of the job was lost; the cause is in its log",
    "hang": "a process waited for the others for too long",
    "preemption": "it was stopped from outside",
    "misconfiguration": "it could not start as it is set up",
    "crash": "the program failed; nothing says that memory ran out",
    "threads": "the system refused another thread, process, file or locked page: a "
    "limit, not memory",
    "no_capacity": "a cluster or a service had no room or no quota left for it: try "
    "again later, or ask for less",
}

FILE_SIZE = (
    "a file grew above the size that is allowed for one (ulimit -f, or the file "
    "system's limit)"
)

_file_size = re.compile(r"too large|\bEFBIG\b|rrno (?:= )?27\b|size limit|\bSIGXFSZ\b")
_limits = (
    re.compile(r"(?:more|larger|bigger) than (?:the limit \()?(\d{6,12}) ?bytes"),
    re.compile(
        r"(?:exceed\w{0,3}|than|limited to|limit of|size of|limit is) (?:the )?"
        r"(\d{1,5} ?[MG])i?B\b"
    ),
)
_TWO_GB = 2**31


def summary_of(kind: Kind, text: str) -> str:
    """What happened, with what the line tells of the limit."""
    if kind == "disk" and _file_size.search(text):
        return FILE_SIZE
    if kind != "protobuf_limit":
        return SUMMARIES[kind]
    return f"{SUMMARIES[kind]} ({_protobuf_limit(text)})"


def _protobuf_limit(text: str) -> str:
    """2 GB since protobuf 3.2, 64 MB before, or what a program has set."""
    found = next((m[1] for p in _limits if (m := p.search(text))), None)
    if found is None:
        return "2 GB"
    if not found.isdigit():
        return f"{found[:-1].strip()} {found[-1]}B"
    limit = int(found)
    return "2 GB" if _TWO_GB - limit in (0, 1) else units.format_bytes(limit)
