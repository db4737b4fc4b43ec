"""Whether a job that has failed on a cluster is submitted again, and how changed.

Covers: why it failed, from its last pod; the decision, a function of that, of what the
job file allows and of what was tried before. Does not cover: carrying it out
(``oomrun.cli.resubmitting``).

A pod that ran out of device memory has already tried what it may; what is left to
somebody outside is what a pod cannot do: more host memory, a pod elsewhere, and what
the pod had no restart left for: the micro-batch, a lever for host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oomrun.core import last_words
from oomrun.core.levers import LEVERS, in_words
from oomrun.core.units import format_bytes
from oomrun.kubernetes.endings import Standing, last_failed
from oomrun.kubernetes.finding import dig, listing, mapping
from oomrun.kubernetes.submission import CONTAINERS
from oomrun.stops import STOPPED_EXIT_CODE

__all__ = [
    "Ending", "Failure", "GiveUp", "Resubmit", "Settings", "decide", "ending",
]  # fmt: skip

Manifest = dict[str, Any]
Failure = Literal[
    "host_oom", "device_oom", "evicted", "stopped", "deadline", "training",
    "job_file", "nothing_fits", "killed",
]  # fmt: skip

_GIB = 2**30
_GROWTH = 1.5
_BY_CODE: dict[int, Failure] = {
    1: "training",
    2: "job_file",
    3: "nothing_fits",
    STOPPED_EXIT_CODE: "stopped",
}
_OF_HOST = "host_oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job has failed.

    Attributes:
        uid: of the object that failed, so that nothing is done twice for it.
        failure: why.
        exit_code: what waiting for the job would end with.
        message: for people.
        micro_batch_failed: the smallest that ran out of device memory.
        levers: that the run had pulled, where its last words say so.
    """

    uid: str
    failure: Failure
    exit_code: int
    message: str
    micro_batch_failed: int | None = None
    levers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was submitted, as far as it may be changed.

    Attributes:
        memory_bytes: host memory of each pod.
        memory_max_bytes: what that may become; None: it stays.
        micro_batch_fixed: the job file names the micro-batch, so it stays.
        levers: that the job file lists and that are not in force from the beginning.
        pulled: those that are.
    """

    memory_bytes: int
    memory_max_bytes: int | None
    micro_batch_fixed: bool = False
    levers: tuple[str, ...] = ()
    pulled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resubmit:
    """Submit it again, with these values over the job file's."""

    reason: str
    memory_bytes: int | None = None
    micro_batch_max: int | None = None
    pulled: tuple[str, ...] | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """As ``--set`` takes them."""
        changed = []
        if self.memory_bytes is not None:
            # In whole MiB: the job file's sizes have no more digits than that.
            changed.append(f"kubernetes.memory={self.memory_bytes // 2**20}MiB")
        if self.micro_batch_max is not None:
            changed.append(f"batch.micro={{max: {self.micro_batch_max}}}")
        if self.pulled is not None:
            changed.append(f"recovery.pulled=[{', '.join(self.pulled)}]")
        return tuple(changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Leave it as it is."""

    reason: str
    exit_code: int


def ending(job: Manifest, pods: Sequence[Manifest], found: Standing) -> Ending | None:
    """How the job has failed; None where it has not.

    Args:
        job: as the API server gives it.
        pods: its pods that are still there.
        found: how it stands, by the same.
    """
    if found.state != "failed":
        return None
    ordered = sorted(
        pods, key=lambda pod: str(dig(pod, "metadata", "creationTimestamp"))
    )
    pod = last_failed(ordered) or {}
    ended = _terminated(pod)
    said = last_words.read(ended.get("message"))
    size, pulled = said.get("micro_batch_failed"), listing(said.get("levers"))
    return Ending(
        uid=str(dig(job, "metadata", "uid")),
        failure=_failure(job, pod, ended, said),
        exit_code=found.exit_code or 0,
        message=found.message,
        micro_batch_failed=size if isinstance(size, int) and size > 0 else None,
        levers=tuple(each for each in pulled if isinstance(each, str)),
    )


def _failure(
    job: Manifest, pod: Manifest, ended: Manifest, said: dict[str, Any]
) -> Failure:
    for condition in map(mapping, listing(dig(job, "status", "conditions"))):
        if condition.get("reason") == "DeadlineExceeded":
            return "deadline"
    if _disrupted(pod):
        return "evicted"
    if ended.get("reason") == "OOMKilled" or said.get("cause") == _OF_HOST:
        return "host_oom"
    code = ended.get("exitCode")
    if said.get("cause") == "device_oom" and code in (1, 3):
        return "device_oom"
    return _BY_CODE.get(code, "killed") if isinstance(code, int) else "killed"


def _disrupted(pod: Manifest) -> bool:
    """Whether its node, or somebody with more right to it, has taken it away."""
    conditions = map(mapping, listing(dig(pod, "status", "conditions")))
    return dig(pod, "status", "reason") in ("Evicted", "Preempted", "Shutdown") or any(
        each.get("type") == "DisruptionTarget" and each.get("status") == "True"
        for each in conditions
    )


def _terminated(pod: Manifest) -> Manifest:
    for status in map(mapping, listing(dig(pod, "status", "containerStatuses"))):
        if status.get("name") in CONTAINERS:
            return mapping(dig(status, "state", "terminated"))
    return {}


def decide(
    end: Ending, settings: Settings, *, used: int, most: int
) -> Resubmit | GiveUp:
    """What follows a failure.

    Args:
        end: the failure.
        settings: those of the job that failed.
        used: how often it was submitted again already.
        most: how often it may be.
    """
    decision = _by_failure(end, settings)
    if isinstance(decision, Resubmit) and used >= most:
        return GiveUp(
            reason=f"{end.message}; it was submitted again {used} times (--resubmits)",
            exit_code=end.exit_code,
        )
    return decision


def _by_failure(end: Ending, settings: Settings) -> Resubmit | GiveUp:
    stay = GiveUp(reason=end.message, exit_code=end.exit_code)
    match end.failure:
        case "host_oom":
            return _more_or_less_memory(end, settings)
        case "device_oom":
            return _smaller(end, settings)
        case "evicted" | "stopped" | "killed":
            return Resubmit(reason=f"{end.message}: again, as it was")
        case "deadline" | "training" | "job_file" | "nothing_fits":
            return stay


def _more_or_less_memory(end: Ending, settings: Settings) -> Resubmit | GiveUp:
    """More host memory while the job file lets it have more, then to need less."""
    most, had = settings.memory_max_bytes, settings.memory_bytes
    if most is None or had >= most:
        return _need_less(end, settings)
    # In whole GiB, as people write it.
    wanted = -int(-had * _GROWTH // _GIB) * _GIB
    memory = min(most, max(wanted, had + _GIB))
    change = f"kubernetes.memory {format_bytes(had)} -> {format_bytes(memory)}"
    return Resubmit(reason=f"{end.message}: {change}", memory_bytes=memory)


def _need_less(end: Ending, settings: Settings) -> Resubmit | GiveUp:
    """The next lever for host memory that neither we nor the run have pulled."""
    known = {*settings.pulled, *end.levers}
    for name in settings.levers:
        if name in LEVERS and LEVERS[name].host and name not in known:
            return Resubmit(
                reason=f"{end.message}: lever {in_words(name)}",
                pulled=(*settings.pulled, name),
            )
    most = settings.memory_max_bytes
    if most is None:
        hint = "kubernetes.memory_max would let it have more"
        return GiveUp(reason=f"{end.message} ({hint})", exit_code=end.exit_code)
    why = f"it had all that kubernetes.memory_max allows ({format_bytes(most)})"
    return GiveUp(reason=f"{end.message}; {why}", exit_code=end.exit_code)


def _smaller(end: Ending, settings: Settings) -> Resubmit | GiveUp:
    failed = end.micro_batch_failed
    if settings.micro_batch_fixed or failed is None or failed < 2:
        return GiveUp(reason=end.message, exit_code=end.exit_code)
    size = failed // 2
    return Resubmit(
        reason=f"{end.message}: micro-batch {failed} -> {size} at most",
        micro_batch_max=size,
    )
