"""What a log alone says went wrong: which of its lines decides, and what it means.

Covers: errors, statuses and hints, and their order. Does not cover: counters and exit
codes (``judging``), the lines (``log_reading``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from oomrun.core import units
from oomrun.core.causes import Cause
from oomrun.core.log_facts import Facts, facts_of, together
from oomrun.core.log_form import Kind
from oomrun.core.log_reading import DEVICE_KINDS, MEMORY_KINDS, Hit, Reading, read
from oomrun.core.verdict import SHM_IS_FULL, Clues, Verdict

__all__ = ["CAUSES", "SUMMARIES", "by_text", "decisive_error", "from_text", "warned_of"]


def from_text(text: str, shm_free_bytes: int | None = None) -> Verdict | None:
    """What the text of a program that failed says.

    Args:
        text: the text.
        shm_free_bytes: what /dev/shm had left, which tells what a disk's error is of.
    """
    clues = Clues(text=text, exit_code=1, shm_free_bytes=shm_free_bytes)
    return by_text(clues, read(text))


# Of a queue that ends the whole job. What comes after it was in a pipe.
_ends_the_job = re.compile(
    r"\bbeing killed\b|\bjob killed\b|\bTERM_MEMLIMIT\b|[Kk]illing container"
    r"|[Cc]ontainer killed on request|\bExceeded (?:job|step) memory limit"
)


def _cancelled(hit: Hit, clues: Clues, reading: Reading) -> bool:
    """Whether the program got over it: it trained on, and did not end of it."""
    if not reading.went_on_after(hit):
        return False
    if clues.exit_code == 0:
        return True
    if _ends_the_job.search(hit.text):
        # That it was cancelled follows from the kill.
        return reading.crashed_after(hit, but="preemption")
    return clues.exit_code is None or reading.crashed_after(hit)


def decisive_error(clues: Clues, reading: Reading) -> Hit | None:
    """The line that tells the failure, where one does by itself."""
    live = [
        hit for hit in reading.hits
        if hit.form.role == "error" and not _cancelled(hit, clues, reading)
    ]  # fmt: skip
    if not live:
        return None
    last = live[-1]
    memory = [hit for hit in live if hit.form.kind in MEMORY_KINDS]
    if last.form.kind == "disk" and memory:
        # After running out of memory there may be no room for its checkpoint either.
        last = memory[-1]
    last = _pools_own(last, live)
    kinds = {hit.form.kind: hit for hit in live}
    if last.form.kind in ("disk", "host_allocator") and "shm" in kinds:
        return kinds["shm"]
    for particular in ("gpu_async_allocator", "nccl", "gpu_library", "gpu_context"):
        general = ("gpu_allocator", "xla")
        if last.form.kind in general and particular in kinds:
            whose = kinds[particular]
            if particular == "gpu_async_allocator" or not _tells_shape(reading, last):
                return whose
    return last


_asked_by = re.compile(r"requested by op \S*?([^\s/]{1,200})(?=\s|$)")
# Operations that run what XLA compiled.
_runs_a_cluster = re.compile(r"^(?:xla_?\w*|cluster_\w*|\w*PartitionedCall\w*)$", re.I)


def _pools_own(last: Hit, live: list[Hit]) -> Hit:
    """The pool's own line, where an operation of TensorFlow asked for memory.

    What tries a convolution's algorithms uses XLA's allocator and its words.
    """
    if last.form.kind != "xla" or "while trying to allocate" not in last.text:
        return last
    size = facts_of(last.text).requested_bytes
    for hit in reversed(live):
        asked = _asked_by.search(hit.text)
        if hit.form.kind != "gpu_allocator" or asked is None:
            continue
        same = size in (None, facts_of(hit.text).requested_bytes)
        return hit if same and not _runs_a_cluster.match(asked[1]) else last
    return last


def _tells_shape(reading: Reading, hit: Hit) -> bool:
    """Whether the line tells which tensor: then it is the allocator's own word."""
    return reading.facts(hit, ()).shape is not None


def by_text(clues: Clues, reading: Reading) -> Verdict | None:
    error = decisive_error(clues, reading)
    if error is not None:
        return _of_error(error, clues, reading)
    statuses = _live(reading, "status")
    hints = _live(reading, "hint")
    shortages = _shortages(reading)
    memory = _of_memory(hints)
    short = bool(memory or shortages)
    if short and not statuses:
        statuses = [hit for hit in hints if hit.form.kind == "gpu_library"]
    if statuses and not short and _set_up_wrong(reading):
        return None
    if statuses:
        found = _of_error(statuses[-1], clues, reading)
        return replace(found, confidence=0.9 if short else 0.5)
    # After a hint TensorFlow asks for less: where that is told of, it went on.
    last = shortages[-1].line.number if shortages else -1
    real = [hit for hit in memory if hit.line.number > last]
    if real:
        first = reading.first_of_ladder(real[-1])
        return replace(_of_error(first, clues, reading), confidence=0.7)
    return None


def _set_up_wrong(reading: Reading) -> bool:
    """Whether a line names another cause of what a status may be of memory."""
    return any(
        hit.form.kind == "misconfiguration" and hit.form.role == "other"
        for hit in reading.hits
    )


def _of_memory(hints: list[Hit]) -> list[Hit]:
    """Those that name memory; a status that is not supported does not."""
    return [hit for hit in hints if hit.form.kind != "gpu_library"]


def _live(reading: Reading, role: str) -> list[Hit]:
    return [
        hit for hit in reading.hits
        if hit.form.role == role and not reading.went_on_after(hit)
    ]  # fmt: skip


def _shortages(reading: Reading) -> list[Hit]:
    """Lines of an allocation that may fail, and did for lack of memory."""
    return [
        hit for hit in reading.hits
        if hit.form.kind == "gpu_allocator" and hit.form.role == "harmless"
        and ("out of memory" in hit.text or "redzone" in hit.text)
    ]  # fmt: skip


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


def _kind_of(hit: Hit, clues: Clues, reading: Reading) -> Kind:
    kind = hit.form.kind
    if kind == "disk" and "Evict" not in (clues.k8s_reason or ""):
        full = clues.shm_free_bytes is not None and clues.shm_free_bytes < SHM_IS_FULL
        # The message has no path, or names none of a disk's.
        if hit.line.number in reading.near_shm or (full and "/" not in hit.text):
            return "shm"
    return kind


def warned_of(reading: Reading) -> Facts:
    """The first size that TensorFlow warned of as a large part of host memory."""
    for hit in reading.hits:
        if hit.form.kind == "host_allocator" and hit.form.role == "harmless":
            return reading.facts(hit, ())
    return Facts()


_file_size = re.compile(r"too large|\bEFBIG\b|rrno (?:= )?27\b|size limit|\bSIGXFSZ\b")
_limits = (
    re.compile(r"(?:more|larger|bigger) than (?:the limit \()?(\d{6,12}) ?bytes"),
    re.compile(
        r"(?:exceed\w{0,3}|than|limited to|limit of|size of|limit is) (?:the )?"
        r"(\d{1,5} ?[MG])i?B\b"
    ),
)
_TWO_GB = 2**31


def _summary(kind: Kind, text: str) -> str:
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


def _short_device(reading: Reading) -> str | None:
    """The device of which a line told that its pool was short."""
    return next(
        (device for hit in reversed(_shortages(reading))
         if (device := reading.facts(hit, ()).device)), None
    )  # fmt: skip


def _of_error(hit: Hit, clues: Clues, reading: Reading) -> Verdict:
    kind = _kind_of(hit, clues, reading)
    is_oom = kind in MEMORY_KINDS
    facts = Facts()
    if is_oom and kind not in ("host_killed", "shm"):
        facts = reading.facts(hit, DEVICE_KINDS | {"host_allocator"})
        if kind == "host_allocator":
            facts = together(facts, warned_of(reading))
    elif kind == "shm":
        facts = reading.facts(hit, ("shm",))
    elif kind == "protobuf_limit":
        facts = replace(
            reading.facts(hit, ()), device=None, shape=None, dtype=None, operation=None
        )
    cause, summary = CAUSES.get(kind, Cause.DEVICE_OOM), _summary(kind, hit.text)
    if kind == "host_allocator" and "bfc_cpu" in hit.text:
        # A pool with a limit, as a GPU's.
        cause, summary = Cause.DEVICE_OOM, "the CPU device's pool ran out of memory"
    elif kind in DEVICE_KINDS and facts.device is None:
        facts = replace(facts, device=_short_device(reading))
    return Verdict(
        is_oom=is_oom,
        kind=kind,
        cause=cause,
        confidence=0.95,
        summary=summary,
        told=hit.text,
        facts=facts,
    )
