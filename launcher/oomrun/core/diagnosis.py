"""From what was seen of an attempt's end to what we conclude: evidence -> cause.

Covers: one attempt of one worker, or of one command; facts (what the worker reported,
how it ended, kernel counters), then its last log lines. Does not cover: what such lines
look like (``oom_text.py``), what to do (``policy.py``).
"""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass

from oomrun.core import command, units
from oomrun.core.causes import Cause
from oomrun.core.events import LeakFound, OomOccurred, ScriptEnded
from oomrun.core.judging_text import from_text
from oomrun.core.oom_text import find_exhaustion, looks_like_device_oom
from oomrun.core.topology import HOST_ID
from oomrun.core.verdict import SHM_IS_FULL

__all__ = ["Cause", "Diagnosis", "Evidence", "diagnose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen of a worker's end.

    Attributes:
        exit_code: of the process; None when a signal ended it.
        signal: the signal's number, None when the process exited by itself.
        script: what the worker itself reported of the script's end.
        oom: the last memory exhaustion it reported in this attempt.
        leak: what it reported of memory that grows, before it left.
        stop_requested: we asked it to checkpoint and stop.
        timed_out: we stopped it since it no longer reported anything.
        host_oom_kills: OOM kills that the kernel counted in our cgroup meanwhile.
        ready: the worker had got as far as running the script.
        log_tail: its last lines of output.
        command: the program is not ours and reports nothing: its exit is its report.
        device: what it was given; with a CPU, host memory is the device's memory.
        repeated: its output is that of the attempt before, to the last byte.
        lost: the place where it was, which is gone.
        shm_free_bytes: what /dev/shm had left as it ended.
    """

    exit_code: int | None = None
    signal: int | None = None
    script: ScriptEnded | None = None
    oom: OomOccurred | None = None
    leak: LeakFound | None = None
    stop_requested: bool = False
    timed_out: bool = False
    host_oom_kills: int = 0
    ready: bool = True
    log_tail: str = ""
    command: bool = False
    device: str = ""
    repeated: bool = False
    lost: str = ""
    shm_free_bytes: int | None = None

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm had nothing left."""
        free = self.shm_free_bytes
        return free is not None and free < SHM_IS_FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause and one sentence for a person.

    ``silent``: the process ended as if all were well, but its script's end was never
    reported. ``repeated``: it failed with the very output of the attempt before.
    ``told``: the line of output that the cause was read from.
    ``container``: all of it was killed, oomrun with it, so that nobody saw the end.
    """

    cause: Cause
    summary: str
    silent: bool = False
    repeated: bool = False
    told: str = ""
    container: bool = False


def diagnose(evidence: Evidence) -> Diagnosis:
    """The cause of an attempt's end: facts beat text, a report beats how it died.

    A worker that reported the script's end has ended that way, whatever came after:
    XLA on a CPU, for one, aborts at interpreter exit after an OOM it survived.
    """
    if evidence.command:
        return _of_command(evidence)
    if evidence.script is not None:
        return _from_report(evidence.script, evidence)
    if evidence.lost:
        return Diagnosis(
            cause=Cause.PREEMPTION if evidence.stop_requested else Cause.KILLED,
            summary=f"the worker is gone with {evidence.lost}",
        )
    if evidence.timed_out:
        return Diagnosis(
            cause=Cause.HANG,
            summary="the worker stopped reporting and was ended; the stacks of all "
            "workers are in their logs",
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
    if evidence.leak is not None:
        return _leak_reported(evidence.leak)
    if evidence.oom is not None and evidence.oom.recovery != "in_process":
        return _oom_reported(evidence.oom)
    if evidence.signal is not None:
        return _from_signal(evidence)
    if not evidence.ready:
        return Diagnosis(
            cause=Cause.MISCONFIGURATION,
            summary=f"the worker could not start (exit code {evidence.exit_code})"
            f"{_last_words(evidence)}",
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
        return Diagnosis(cause=Cause.FINISHED, summary=_finished(evidence.signal))
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
    raised = f"{script.exception}{at}{said}"
    other = _other_limit(f"{script.exception}: {script.message}", evidence)
    if other is not None:
        return Diagnosis(cause=other[0], summary=f"{other[1]} ({raised})")
    return Diagnosis(cause=Cause.CRASH, summary=raised)


def _other_limit(text: str, evidence: Evidence) -> tuple[Cause, str] | None:
    """What ran out that is no memory to plan: a disk, /dev/shm, a message's size."""
    found = from_text(text, evidence.shm_free_bytes)
    if found is None or found.cause is None or found.cause is Cause.CRASH:
        return None
    return (found.cause, found.summary) if found.cause.of_the_program else None


def _oom_reported(oom: OomOccurred) -> Diagnosis:
    size = f" at micro-batch {oom.micro_batch_size}" if oom.micro_batch_size else ""
    phase = f" in {oom.phase}" if oom.phase != "unknown" else ""
    cause = Cause.HOST_OOM if oom.kind == "host" else Cause.DEVICE_OOM
    return Diagnosis(
        cause=cause, summary=f"{oom.device} ran out of memory{phase}{size}"
    )


def _leak_reported(leak: LeakFound) -> Diagnosis:
    grown = units.format_bytes(leak.grown_bytes)
    where = "the host" if leak.device == HOST_ID else leak.device
    many = "step" if leak.steps_left == 1 else "steps"
    end = f"it would have run out in about {leak.steps_left} {many}"
    return Diagnosis(
        cause=Cause.LEAK,
        summary=f"memory of {where} in use between steps grew by {grown} in this "
        f"attempt: {end if leak.steps_left else 'it ran out'}",
    )


_SHM = "shared memory (/dev/shm) is full"
_FROM_OUTSIDE = (signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP)


def _signal_name(number: int) -> str:
    if number in signals.Signals._value2member_map_:
        return signals.Signals(number).name
    return f"signal {number}"


def _finished(number: int | None) -> str:
    """What is said of a script that finished; ``number``: of the signal after that."""
    if number is None:
        return "the script finished"
    return (
        f"the script finished; {_signal_name(number)} ended its process before its "
        "threads and exit handlers were done"
    )


def _from_signal(evidence: Evidence) -> Diagnosis:
    number = evidence.signal or 0
    name = _signal_name(number)
    if number in _FROM_OUTSIDE:
        return Diagnosis(
            cause=Cause.KILLED, summary=f"the worker was killed from outside ({name})"
        )
    told = find_exhaustion(evidence.log_tail)
    if told is not None and told.memory == "device":
        return Diagnosis(
            cause=Cause.DEVICE_OOM,
            summary=f"{name} after memory ran out, by the worker's last lines",
        )
    if told is not None:
        return Diagnosis(
            cause=Cause.HOST_OOM,
            summary=f"host memory ran out: {name} after {_shortened(told.line)!r}",
        )
    if number == signals.SIGBUS and evidence.shm_full:
        return Diagnosis(cause=Cause.SHM_FULL, summary=f"{_SHM}: {name}")
    return Diagnosis(cause=Cause.CRASH, summary=f"the worker died of {name}")


# --- a command ----------------------------------------------------------------------

_SHELL_SIGNALS = range(129, 129 + 64)  # 128 + n: a shell's child died of signal n
_LAST_WORDS = 160


def _of_command(evidence: Evidence) -> Diagnosis:
    """The same for a program that reports nothing but by how it ends."""
    code, number = evidence.exit_code, evidence.signal
    if code == 0 and not evidence.stop_requested:
        return Diagnosis(cause=Cause.FINISHED, summary="the program finished")
    if evidence.timed_out:
        return Diagnosis(cause=Cause.HANG, summary="the program was silent for long")
    if evidence.stop_requested:
        # Also with exit code 0: nobody can tell a program that had just finished from
        # one that ends well when it is told to, and to start it again loses nothing.
        how = _signal_name(number) if number else f"exit code {code}"
        return Diagnosis(
            cause=Cause.PREEMPTION, summary=f"the program was stopped ({how})"
        )
    if code == command.EXIT_STOPPED:
        return Diagnosis(
            cause=Cause.PREEMPTION,
            summary=f"the program stopped by itself, to go on later (exit code {code})",
        )
    if evidence.host_oom_kills > 0:
        return _exhausted("host", "the kernel killed a process", evidence)
    if code == command.EXIT_OUT_OF_MEMORY:
        return _exhausted("device", f"by its exit code {code}", evidence)
    if number is None and code is not None and code in _SHELL_SIGNALS:
        number = code - 128
    if number in _FROM_OUTSIDE:
        return Diagnosis(
            cause=Cause.KILLED,
            summary=f"the program was killed from outside ({_signal_name(number)})",
        )
    found = find_exhaustion(evidence.log_tail)
    if found is not None:
        return _exhausted(found.memory, found.line, evidence)
    if not evidence.ready:
        return Diagnosis(
            cause=Cause.MISCONFIGURATION,
            summary=f"the program could not start{_last_words(evidence)}",
        )
    how = f"died of {_signal_name(number)}" if number else f"exited with {code}"
    other = _other_limit(evidence.log_tail, evidence)
    if other is None and number == signals.SIGBUS and evidence.shm_full:
        other = (Cause.SHM_FULL, _SHM)
    cause, why = other or (Cause.CRASH, "")
    return Diagnosis(
        cause=cause,
        summary=f"the program {how}{f': {why}' if why else _last_words(evidence)}",
        repeated=evidence.repeated,
    )


def _exhausted(memory: str, told: str, evidence: Evidence) -> Diagnosis:
    told = _shortened(told)
    # The CPU's memory is the host's: there a smaller micro-batch does help.
    if memory == "device" or evidence.device.startswith("cpu"):
        return Diagnosis(
            cause=Cause.DEVICE_OOM,
            summary=f"{evidence.device} ran out of memory ({told})",
            told=told,
        )
    return Diagnosis(
        cause=Cause.HOST_OOM, summary=f"host memory ran out ({told})", told=told
    )


def _last_words(evidence: Evidence) -> str:
    lines = [line.strip() for line in evidence.log_tail.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f": {_shortened(last)}" if last else ""


def _shortened(line: str) -> str:
    clean = "".join(letter if letter.isprintable() else " " for letter in line)
    return clean if len(clean) <= _LAST_WORDS else clean[: _LAST_WORDS - 1] + "…"
