"""From what was seen of an attempt's end to what we conclude: evidence -> cause.

Covers: one attempt of one worker; facts only (what the worker reported, how it ended,
kernel counters), then its last log lines. Does not cover: what to do (``policy.py``).
"""

from __future__ import annotations

import enum
import re
import signal as signals
from dataclasses import dataclass

from oomrun.core.events import OomOccurred, ScriptEnded

__all__ = ["Cause", "Diagnosis", "Evidence", "diagnose", "looks_like_device_oom"]


class Cause(str, enum.Enum):
    """Why an attempt ended. The value is the word in the journal and in metrics."""

    FINISHED = "finished"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    CRASH = "crash"
    KILLED = "killed"
    PREEMPTION = "preemption"
    HANG = "hang"
    MISCONFIGURATION = "misconfiguration"

    @property
    def budget(self) -> str:
        """The budget of ``recovery.max_restarts`` that this cause counts against."""
        if self in (Cause.DEVICE_OOM, Cause.HOST_OOM):
            return "oom"
        if self in (Cause.PREEMPTION, Cause.HANG):
            return str(self.value)
        return "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen of a worker's end.

    Attributes:
        exit_code: of the process; None when a signal ended it.
        signal: the signal's number, None when the process exited by itself.
        script: what the worker itself reported of the script's end.
        oom: the last memory exhaustion it reported in this attempt.
        stop_requested: we asked it to checkpoint and stop.
        timed_out: we stopped it since it no longer reported anything.
        host_oom_kills: OOM kills that the kernel counted in our cgroup meanwhile.
        ready: the worker had got as far as running the script.
        log_tail: its last lines of output.
    """

    exit_code: int | None = None
    signal: int | None = None
    script: ScriptEnded | None = None
    oom: OomOccurred | None = None
    stop_requested: bool = False
    timed_out: bool = False
    host_oom_kills: int = 0
    ready: bool = True
    log_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause and one sentence for a person.

    ``silent``: the process ended as if all were well, but its script's end was never
    reported.
    """

    cause: Cause
    summary: str
    silent: bool = False


# Forms that TensorFlow's allocators and the GPU libraries use when memory is short.
# Only read where nothing better is known; warnings that name the same words but say
# that they are harmless ("not a failure") do not match.
_DEVICE_OOM = re.compile(
    r"OOM when allocating tensor"
    r"|ResourceExhaustedError"
    r"|RESOURCE_EXHAUSTED: (?!.*gRPC)"
    r"|Out of memory (?:while|trying to) (?:trying to )?allocat"
    r"|Dst tensor is not initialized"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)


def looks_like_device_oom(text: str) -> bool:
    """Whether ``text`` says that a device's memory ran out, as TensorFlow says it."""
    return _DEVICE_OOM.search(text) is not None


def diagnose(evidence: Evidence) -> Diagnosis:
    """The cause of an attempt's end: facts beat text, a report beats how it died.

    A worker that reported the script's end has ended that way, whatever came after:
    XLA on a CPU, for one, aborts at interpreter exit after an OOM it survived.
    """
    if evidence.script is not None:
        return _from_report(evidence.script, evidence)
    if evidence.timed_out:
        return Diagnosis(
            cause=Cause.HANG, summary="the worker stopped reporting and was ended"
        )
    if evidence.host_oom_kills > 0:
        return Diagnosis(
            cause=Cause.HOST_OOM,
            summary="the kernel killed the worker: host memory ran out",
        )
    if evidence.stop_requested:
        return Diagnosis(
            cause=Cause.PREEMPTION,
            summary="the worker was stopped before it could write a checkpoint",
        )
    if evidence.oom is not None and evidence.oom.recovery != "in_process":
        return _oom_reported(evidence.oom)
    if evidence.signal is not None:
        return _from_signal(evidence)
    if not evidence.ready:
        return Diagnosis(
            cause=Cause.MISCONFIGURATION,
            summary=f"the worker could not start (exit code {evidence.exit_code})",
        )
    if looks_like_device_oom(evidence.log_tail):
        return Diagnosis(
            cause=Cause.DEVICE_OOM,
            summary="the worker died, and its last lines say that memory ran out",
        )
    return Diagnosis(
        cause=Cause.CRASH,
        summary=f"the worker ended without a report (exit code {evidence.exit_code})",
        silent=evidence.exit_code == 0,
    )


def _from_report(script: ScriptEnded, evidence: Evidence) -> Diagnosis:
    if script.outcome == "finished" or (
        # ``sys.exit(0)`` at a script's end is how many scripts finish.
        script.outcome == "exited" and script.exit_code == 0
    ):
        return Diagnosis(cause=Cause.FINISHED, summary="the script finished")
    if script.outcome == "stopped":
        return Diagnosis(
            cause=Cause.PREEMPTION, summary="stopped on request, with a checkpoint"
        )
    if script.oom and script.exception == "MemoryError":
        return Diagnosis(
            cause=Cause.HOST_OOM, summary=f"host memory ran out at {script.location}"
        )
    if script.oom:
        if evidence.oom is not None:
            return _oom_reported(evidence.oom)
        return Diagnosis(
            cause=Cause.DEVICE_OOM,
            summary=f"device memory ran out outside fit, at {script.location}",
        )
    if script.outcome == "exited":
        return Diagnosis(
            cause=Cause.CRASH, summary=f"the script exited with {script.exit_code}"
        )
    at = f" at {script.location}" if script.location else ""
    first_line = script.message.strip().splitlines()[:1]
    said = f": {first_line[0]}" if first_line else ""
    return Diagnosis(cause=Cause.CRASH, summary=f"{script.exception}{at}{said}")


def _oom_reported(oom: OomOccurred) -> Diagnosis:
    size = f" at micro-batch {oom.micro_batch_size}" if oom.micro_batch_size else ""
    cause = Cause.HOST_OOM if oom.kind == "host" else Cause.DEVICE_OOM
    return Diagnosis(
        cause=cause,
        summary=f"{oom.device} ran out of memory in {oom.phase}{size}",
    )


def _from_signal(evidence: Evidence) -> Diagnosis:
    number = evidence.signal or 0
    name = (
        signals.Signals(number).name
        if number in signals.Signals._value2member_map_
        else f"signal {number}"
    )
    if number in (signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP):
        return Diagnosis(
            cause=Cause.KILLED, summary=f"the worker was killed from outside ({name})"
        )
    if looks_like_device_oom(evidence.log_tail):
        return Diagnosis(
            cause=Cause.DEVICE_OOM,
            summary=f"{name} after memory ran out, by the worker's last lines",
        )
    return Diagnosis(cause=Cause.CRASH, summary=f"the worker died of {name}")
