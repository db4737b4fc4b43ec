"""What a log alone says went wrong: which of its lines decides, and what it means.

Covers: errors, statuses and hints, and their order. Does not cover: counters and exit
codes (``judging``), the lines (``log_reading``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from oomrun.core.causes import Cause
from oomrun.core.judging_summaries import CAUSES, summary_of
from oomrun.core.log_facts import Facts, facts_of, together
from oomrun.core.log_form import Kind
from oomrun.core.log_reading import DEVICE_KINDS, MEMORY_KINDS, Hit, Reading, read
from oomrun.core.verdict import SHM_IS_FULL, Clues, Verdict

__all__ = ["by_text", "decisive_error", "from_text", "warned_of"]


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
    last = _pools_own(_of_first_rank(last, live), live)
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


def _of_first_rank(last: Hit, live: list[Hit]) -> Hit:
    """The same of the rank that failed first, where several found no memory."""
    alike = [hit for hit in live if hit.form.kind == last.form.kind]
    if not last.line.rank or last.form.kind not in MEMORY_KINDS:
        return last
    return [hit for hit in alike if hit.line.rank == alike[0].line.rank][-1]


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
    if statuses and not short and _other_cause(reading):
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


def _other_cause(reading: Reading) -> bool:
    """Whether a line names another cause of what a status may be of memory."""
    kinds = ("misconfiguration", "threads", "no_capacity")
    return any(
        hit.form.kind in kinds and hit.form.role == "other" for hit in reading.hits
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


_writes = re.compile(
    r"Detected at node \S{0,200}\b(?:Save(?:V2|Slices)?|MergeV2Checkpoints|WriteFile)\b"
)


def _on_the_host(hit: Hit) -> bool:
    """Whether the operation that asked runs on the host, and no allocator is named."""
    if "OOM when allocating" not in hit.text or "by allocator" in hit.text:
        return False
    return (facts_of(hit.text).device or "").startswith("CPU:")


def _kind_of(hit: Hit, clues: Clues, reading: Reading) -> Kind:
    kind = hit.form.kind
    if kind == "disk" and "Evict" not in (clues.k8s_reason or ""):
        full = clues.shm_free_bytes is not None and clues.shm_free_bytes < SHM_IS_FULL
        # The message has no path, or names none of a disk's.
        if hit.line.number in reading.near_shm or (full and "/" not in hit.text):
            return "shm"
    if kind == "gpu_allocator":
        if hit.form.role == "status" and _writes.search(hit.text):
            return "disk"
        if _on_the_host(hit):
            return "host_allocator"
    return kind


def warned_of(reading: Reading) -> Facts:
    """The first size that TensorFlow warned of as a large part of host memory."""
    for hit in reading.hits:
        if hit.form.kind == "host_allocator" and hit.form.role == "harmless":
            return reading.facts(hit, ())
    return Facts()


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
    cause, summary = CAUSES.get(kind, Cause.DEVICE_OOM), summary_of(kind, hit.text)
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
