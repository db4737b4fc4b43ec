"""What is known of a program's end, and what went wrong: as data.

Covers: clues, verdicts, their JSON form. Does not cover: from one to the other
(``judging``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oomrun.core.causes import Cause
from oomrun.core.log_facts import Facts

__all__ = ["SHM_IS_FULL", "Clues", "Phase", "Verdict", "clues_of", "to_json"]

#: Less than this left in /dev/shm is nothing left.
SHM_IS_FULL = 16 * 2**20

Phase = Literal["start", "gradients", "apply", "evaluate", "checkpoint", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clues:
    """A log and what is known beside it; None where nothing is.

    Attributes:
        text: the log, or its end.
        exit_code: negative or 128+n for signal n.
        cgroup_oom_kill: OOM kills that were counted in the job's cgroup.
        k8s_reason: why Kubernetes says the container ended.
        slurm_state: of the job.
        worker_pids: the job's own processes, to know them in the kernel's log.
        other_pids_on_device: processes of others on the same device.
        shm_free_bytes: what /dev/shm had left.
    """

    text: str
    exit_code: int | None = None
    cgroup_oom_kill: int | None = None
    k8s_reason: str | None = None
    slurm_state: str | None = None
    worker_pids: tuple[int, ...] | None = None
    other_pids_on_device: tuple[int, ...] | None = None
    shm_free_bytes: int | None = None

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, if one did."""
        code = self.exit_code
        if code is None:
            return None
        if -65 < code < 0:
            return -code
        return code - 128 if 128 < code < 128 + 65 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What went wrong.

    Attributes:
        is_oom: device or host memory (/dev/shm included) ran out, and that ended it.
        kind: which memory or limit, or ``not_oom``.
        cause: as the supervisor names causes; None where nothing tells.
        phase: of the training, where the text tells.
        confidence: from 0 to 1.
        levers: what would help, the best first.
        summary: one sentence for a person.
        told: the line that it was read from.
        facts: of the allocation that failed.
        signs: what else stood out, such as ``fragmentation``.
    """

    is_oom: bool
    kind: str
    cause: Cause | None
    confidence: float
    summary: str
    phase: Phase = "unknown"
    levers: tuple[str, ...] = ()
    told: str = ""
    facts: Facts = field(default_factory=Facts)
    signs: tuple[str, ...] = ()


def clues_of(
    text: str, exit_code: int | None = None, evidence: Mapping[str, Any] | None = None
) -> Clues:
    """Clues from loose values; what is not known of the evidence is left out."""
    known = evidence or {}

    def number(name: str) -> int | None:
        value = known.get(name)
        return int(value) if isinstance(value, int | float) else None

    def pids(name: str) -> tuple[int, ...] | None:
        value = known.get(name)
        if not isinstance(value, list | tuple):
            return None
        return tuple(pid for pid in value if isinstance(pid, int))

    def word(name: str) -> str | None:
        value = known.get(name)
        return value if isinstance(value, str) and value else None

    return Clues(
        text=text,
        exit_code=exit_code,
        cgroup_oom_kill=number("cgroup_oom_kill"),
        k8s_reason=word("k8s_reason"),
        slurm_state=word("slurm_state"),
        worker_pids=pids("worker_pids"),
        other_pids_on_device=pids("other_pids_on_device"),
        shm_free_bytes=number("shm_free_bytes"),
    )


def to_json(found: Verdict) -> dict[str, Any]:
    """As ``oomrun diagnose --json`` prints it."""
    shape = found.facts.shape
    return {
        "is_oom": found.is_oom,
        "kind": found.kind,
        "cause": found.cause.value if found.cause else None,
        "phase": found.phase,
        "confidence": found.confidence,
        "device": found.facts.device,
        "shape": list(shape) if shape is not None else None,
        "dtype": found.facts.dtype,
        "requested_bytes": found.facts.requested_bytes,
        "operation": found.facts.operation,
        "levers": list(found.levers),
        "signs": list(found.signs),
        "summary": found.summary,
        "told": found.told,
    }
