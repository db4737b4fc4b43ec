"""How a job on a cluster stands, from its Job and its pods.

Covers: ``standing``, a function of what the API server says, in words for people and
with the exit code that the job has ended with. Does not cover: asking it (``cluster``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oomrun.core import last_words, words
from oomrun.core.errors import PlatformError
from oomrun.kubernetes.finding import dig, listing, mapping
from oomrun.kubernetes.submission import CONTAINERS
from oomrun.stops import STOPPED_EXIT_CODE

__all__ = ["Standing", "index", "last_failed", "standing"]

State = Literal["waiting", "running", "stuck", "completed", "failed"]
Manifest = dict[str, Any]

_OURS = PlatformError.exit_code
_KILLED = 128 + 9
_FINAL = (1, 2, 3)
# What a pod ends with that was only told to.
_ENDED = (STOPPED_EXIT_CODE, 128 + 15)
_WIDEST = 300  # of what others say
_MEANING = {
    0: "finished",
    1: "the training failed",
    2: "the job file or the command line is wrong",
    3: "nothing fits into the memory of its device",
    4: "the machine or oomrun itself failed",
    STOPPED_EXIT_CODE: "was stopped, and another pod can go on",
    _KILLED: "was killed (SIGKILL)",
}
# No node's fault, and nothing that becomes better by waiting.
_STUCK = {
    "ImagePullBackOff": "the image cannot be pulled",
    "InvalidImageName": "the image has no valid name",
    "ErrImageNeverPull": "the image is not on the node",
    "CreateContainerConfigError": "the container cannot be made",
    "CreateContainerError": "the container cannot be made",
    "RunContainerError": "the container cannot be started",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job stands.

    Attributes:
        state: "stuck" is no end of the job, but none will come by itself.
        message: for people.
        exit_code: what a command that waits ends with; None: it has to wait on.
        pod: the newest one that has the run, if it has begun: there may be logs.
    """

    state: State
    message: str
    exit_code: int | None = None
    pod: str | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """How a pod ended."""

    exit_code: int
    message: str


def standing(job: Manifest, pods: Sequence[Manifest]) -> Standing:
    """How the job stands.

    Args:
        job: the Job as the API server gives it.
        pods: its pods, in any order; finished ones may be gone.
    """
    ordered = sorted(
        pods, key=lambda pod: str(dig(pod, "metadata", "creationTimestamp"))
    )
    newest = ordered[-1] if ordered else None
    first = next((pod for pod in reversed(ordered) if index(pod) == 0), newest)
    begun = _name(first) if first and _phase(first) != "Pending" else None
    for condition in listing(dig(job, "status", "conditions")):
        if mapping(condition).get("status") != "True":
            continue
        match mapping(condition).get("type"):
            case "Complete" | "Completed" | "Succeeded":
                said = "the job is complete"
                return Standing(state="completed", message=said, exit_code=0, pod=begun)
            case "Failed":
                end = _end_of_job(mapping(condition), ordered)
                said = f"the job failed: {end.message}"
                return Standing(
                    state="failed", message=said, exit_code=end.exit_code, pod=begun
                )
    if newest is None:
        return Standing(state="waiting", message=_without_pod(job))
    slowest = _slowest(ordered)
    before = [
        pod for pod in ordered if index(pod) == index(slowest) and pod is not slowest
    ]
    return _unfinished(slowest, before, begun)


def index(pod: Manifest) -> int:
    """Which of several pods it is; 0 has the run."""
    labels = mapping(dig(pod, "metadata", "labels"))
    if labels.get("training.kubeflow.org/job-role") == "worker":
        return 1 + _number(labels.get("training.kubeflow.org/replica-index"))
    return _number(labels.get("batch.kubernetes.io/job-completion-index"))


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else 0


def _slowest(pods: Sequence[Manifest]) -> Manifest:
    """Of the newest pod of each index the one that the others wait for."""
    newest = {index(pod): pod for pod in pods}
    places = ("Pending", "Failed", "Running")

    def place(number: int) -> tuple[bool, int, int]:
        phase = _phase(newest[number])
        known = places.index(phase) if phase in places else len(places)
        stuck = phase == "Pending" and _pending(newest[number]).state == "stuck"
        return (not stuck, known, number)

    return newest[min(newest, key=place)]


def _without_pod(job: Manifest) -> str:
    queue = dig(job, "metadata", "labels", "kueue.x-k8s.io/queue-name")
    if dig(job, "spec", "suspend"):
        where = f"it waits in the queue {queue}" if queue else "the Job is suspended"
        return f"no pod yet: {_clean(where)}"
    return "no pod yet"


def _unfinished(
    pod: Manifest, before: Sequence[Manifest], begun: str | None
) -> Standing:
    name = _name(pod)
    match _phase(pod):
        case "Running":
            history = [_end_of_pod(each) for each in before[-1:]]
            after = "".join(f"; the one before it {end.message}" for end in history)
            message = f"the pod {name} runs{after}"
            return Standing(state="running", message=message, pod=begun)
        case "Pending":
            return _pending(pod)
        case _:
            message = f"the pod {name} {_end_of_pod(pod).message}; what follows is open"
            return Standing(state="waiting", message=message, pod=begun)


def _pending(pod: Manifest) -> Standing:
    name = _name(pod)
    for condition in map(mapping, listing(dig(pod, "status", "conditions"))):
        if (
            condition.get("type") == "PodScheduled"
            and condition.get("status") != "True"
        ):
            why = _clean(condition.get("message") or condition.get("reason") or "?")
            message = f"no node takes the pod {name} yet: {why}"
            return Standing(state="waiting", message=message)
    waiting = mapping(dig(_container(pod), "state", "waiting"))
    reason = str(waiting.get("reason") or "")
    said = _clean(waiting.get("message") or reason)
    if reason in _STUCK:
        message = f"the pod {name} cannot start: {_STUCK[reason]}: {said}"
        return Standing(state="stuck", message=message, exit_code=_OURS)
    more = (
        f": {said}" if said not in ("", "ContainerCreating", "PodInitializing") else ""
    )
    return Standing(state="waiting", message=f"the pod {name} is being made{more}")


def _end_of_job(condition: Manifest, pods: Sequence[Manifest]) -> _End:
    reason = condition.get("reason")
    if reason == "DeadlineExceeded":
        message = "it took longer than kubernetes.deadline; submitted again it goes on"
        return _End(STOPPED_EXIT_CODE, message)
    pod = last_failed(pods)
    if pod is not None:
        end = _end_of_pod(pod)
        return _End(end.exit_code or _OURS, f"the pod {_name(pod)} {end.message}")
    why = _clean(condition.get("message") or reason or "it does not say why")
    return _End(_OURS, f"{why}; its pods are gone")


def last_failed(pods: Sequence[Manifest]) -> Manifest | None:
    """The pod whose end is the job's, of pods in the order of their beginning.

    Where one of several pods ends the others are ended, too, with whatever codes.
    """
    failed = [pod for pod in pods if _phase(pod) == "Failed"]
    if len({index(pod) for pod in pods}) > 1:
        final = [pod for pod in failed if _end_of_pod(pod).exit_code in _FINAL]
        failed = (
            final
            or [pod for pod in failed if _end_of_pod(pod).exit_code not in _ENDED]
            or failed
        )
    return failed[-1] if failed else None


def _end_of_pod(pod: Manifest) -> _End:
    ended = mapping(dig(_container(pod), "state", "terminated"))
    code = ended.get("exitCode")
    reason = dig(pod, "status", "reason")
    if reason or not isinstance(code, int):  # such as Evicted: by the node, as a whole
        why = _clean(dig(pod, "status", "message") or "it does not say why")
        code = code if isinstance(code, int) and code else _OURS
        return _End(code, f"was ended by its node ({_clean(reason or '?')}): {why}")
    if ended.get("reason") == "OOMKilled":
        return _End(_KILLED, _of_host_memory(pod))
    words_ = last_words.read(ended.get("message"))
    said = _clean(words_.get("reason") or "") or _last_line(ended.get("message"))
    known = _MEANING.get(code)
    if known is None:
        known = f"was killed by signal {code - 128}" if 128 < code < 192 else "ended"
    return _End(code, f"{known} (exit code {code}){f': {said}' if said else ''}")


def _of_host_memory(pod: Manifest) -> str:
    limit = None
    for container in map(mapping, listing(dig(pod, "spec", "containers"))):
        limit = dig(container, "resources", "limits", "memory") or limit
    had = f" of {_clean(limit)}" if limit else ""
    return (
        f"was killed by the kernel for host memory (exit code {_KILLED}): it took more "
        f"than its limit{had}; give it more kubernetes.memory, or load less at once"
    )


def _container(pod: Manifest) -> Manifest:
    for status in map(mapping, listing(dig(pod, "status", "containerStatuses"))):
        if status.get("name") in CONTAINERS:
            return status
    return {}


def _phase(pod: Manifest) -> str:
    return str(dig(pod, "status", "phase") or "Pending")


def _name(pod: Manifest) -> str:
    return str(dig(pod, "metadata", "name"))


def _last_line(text: Any) -> str:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return _clean(lines[-1]) if lines else ""


def _clean(text: Any) -> str:
    return words.one_line(str(text), _WIDEST)
