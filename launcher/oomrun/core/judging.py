"""From a log and what else is known of its end to what went wrong: for any program.

Covers: ``judge``, a function of the text, the exit code and the counters that a kernel
or a scheduler kept. Does not cover: the log alone (``judging_text``), what would help
(``remedies``), an attempt of our own, whose worker reports (``diagnosis``).
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import replace

from oomrun.core import remedies
from oomrun.core.causes import Cause
from oomrun.core.judging_text import (
    CAUSES,
    FILE_SIZE,
    SUMMARIES,
    by_text,
    decisive_error,
    warned_of,
)
from oomrun.core.log_facts import Facts, only_device, together
from oomrun.core.log_lines import lines
from oomrun.core.log_reading import DEVICE_KINDS, Hit, Reading, read
from oomrun.core.verdict import SHM_IS_FULL, Clues, Verdict

__all__ = ["judge"]


def judge(clues: Clues) -> Verdict:
    """What went wrong: counters and states first, then what the log says."""
    reading = read(clues.text)
    clues = _with_counter(clues, reading)
    found = _by_counters(clues, reading) or by_text(clues, reading)
    if found is None:
        found = _by_end(clues, reading)
    signs = remedies.signs(clues.text, reading, found.facts, clues.other_pids_on_device)
    if found.facts.device is None and _of_the_device(found, reading):
        only = Facts(device=only_device(clues.text))
        found = replace(found, facts=together(found.facts, only))
    phase = remedies.phase(clues.text, found.facts) if found.is_oom else "unknown"
    if found.kind == "gpu_context":
        phase = "start"
    if found.is_oom and found.kind != "shm" and _disk_full(reading):
        signs = (*signs, "disk_full")
        # What was being written is the rescue, afterwards.
        phase = "unknown" if phase == "checkpoint" else phase
    found = replace(found, signs=signs, phase=phase)
    if found.kind == "host_killed":
        found = replace(found, facts=warned_of(reading))
    levers = remedies.levers(
        found.kind, is_oom=found.is_oom, cause=found.cause, phase=phase, signs=signs
    )
    found = replace(found, levers=found.levers or levers)
    return replace(found, summary=remedies.sentence(found.summary, found.facts, phase))


def _of_the_device(found: Verdict, reading: Reading) -> bool:
    """Whether the line that was told is of a device that has no name in it."""
    if found.kind == "gpu_context":
        return True
    return any(
        hit.form.kind == "device_fault" and hit.text == found.told
        for hit in reading.hits
    )


def _disk_full(reading: Reading) -> bool:
    return any((h.form.kind, h.form.role) == ("disk", "error") for h in reading.hits)


# --- counters and states ------------------------------------------------------------


# As memory.events and memory.oom_control of a cgroup have it.
_counter = re.compile(r"^oom_kill (\d{1,9})$")


def _with_counter(clues: Clues, reading: Reading) -> Clues:
    """The clues with the kernel's count of kills, where only the text has it."""
    if clues.cgroup_oom_kill is not None or "oom_kill " not in clues.text:
        return clues
    # One that was printed before the training tells nothing of its end.
    since = reading.progress[-1][0] if reading.progress else -1
    found = [
        int(match[1]) for line in lines(clues.text)
        if line.number > since and (match := _counter.match(line.text))
    ]  # fmt: skip
    return replace(clues, cgroup_oom_kill=found[-1]) if found else clues


# How Windows ends a process for which it had no memory or no page file left.
_NO_MEMORY_OF_WINDOWS = frozenset({0xC0000017, 0xC000012D})


def _by_counters(clues: Clues, reading: Reading) -> Verdict | None:
    """What the kernel or a scheduler knows, which no text of the program tells."""
    told = _own_kill(clues, reading)
    if told is not None:
        return _host_killed("the kernel killed it: host memory ran out", 0.99, told)
    error = decisive_error(clues, reading)
    device = error is not None and error.form.kind in DEVICE_KINDS
    killed = clues.signal == 9
    if (clues.k8s_reason or "").lower() == "oomkilled" and (killed or not device):
        return _host_killed(
            "Kubernetes killed the container: it used more host memory than its limit",
            0.98,
        )
    if (clues.slurm_state or "").upper().startswith("OUT_OF_ME") and not device:
        return _host_killed(
            "SLURM counts an OOM kill: host memory ran out (OUT_OF_MEMORY)", 0.98
        )
    if (clues.cgroup_oom_kill or 0) > 0 and (killed or error is None):
        many = "a process" if clues.cgroup_oom_kill == 1 else "processes"
        return _host_killed(
            f"the kernel killed {many} of the job's cgroup: host memory ran out", 0.98
        )
    if clues.signal == 7 and (
        clues.shm_free_bytes is None or clues.shm_free_bytes < SHM_IS_FULL
    ):
        sure = clues.shm_free_bytes is not None
        return Verdict(
            is_oom=True,
            kind="shm",
            cause=Cause.SHM_FULL,
            confidence=0.95 if sure else 0.7,
            summary="it died of SIGBUS, as writing to shared memory does when /dev/shm "
            "is full",
        )
    code = (clues.exit_code or 0) & 0xFFFFFFFF
    if code in _NO_MEMORY_OF_WINDOWS and error is None:
        return Verdict(
            is_oom=True, kind="host_allocator", cause=Cause.HOST_OOM, confidence=0.95,
            summary="Windows ended it: memory and page file were used up",
        )  # fmt: skip
    if clues.signal == 25:
        return Verdict(
            is_oom=False, kind="disk", cause=Cause.DISK_FULL, confidence=0.95,
            summary=f"it died of SIGXFSZ: {FILE_SIZE}",
        )  # fmt: skip
    return None


_kernel_pid = re.compile(
    r"\b(?:[Kk]ill(?:ed)? process|reaped process) (\d+)(?:, UID \d+)?,? ?\((.{0,64}?)\)"
    r"|(?:,task=|process: )([^,]{1,64}), ?pid(?:=|: )(\d+)"
)
_training = re.compile(r"python|train|^pt_|ray|tensorflow|torch|horovod|worker", re.I)


def _own_kill(clues: Clues, reading: Reading) -> str | None:
    """The kernel's line on the kill of one of our processes, if there is one."""
    for hit in reading.hits:
        match = _kernel_pid.search(hit.text)
        if hit.form.role != "kernel" or match is None:
            continue
        pid, name = int(match[1] or match[4]), match[2] or match[3] or ""
        if clues.worker_pids is None:
            if clues.signal == 9 or _training.search(name):
                return hit.text
        elif pid in clues.worker_pids:
            return hit.text
    return None


def _host_killed(summary: str, confidence: float, told: str = "") -> Verdict:
    return Verdict(
        is_oom=True,
        kind="host_killed",
        cause=Cause.HOST_OOM,
        confidence=confidence,
        summary=summary,
        told=told,
    )


# --- how it ended -------------------------------------------------------------------


_STOPPED_BY_KUBERNETES = frozenset(
    {
        "Preempted",
        "Preempting",
        "NodeShutdown",
        "NodeLost",
        "DeadlineExceeded",
        "Terminated",
        "TerminationByKubelet",
    }
)


def _by_end(clues: Clues, reading: Reading) -> Verdict:
    """Nothing says that memory ran out: what the exit code and other lines tell."""
    left = [
        hit for hit in reading.hits
        if clues.exit_code != 0 or not reading.went_on_after(hit)
    ]  # fmt: skip
    others = [hit for hit in left if hit.form.role == "other"]
    killed = [hit for hit in left if hit.form.role == "killed"]
    failed = bool(clues.exit_code)
    state = (clues.slurm_state or "").upper()
    if state.startswith(("PREEMPTED", "TIMEOUT", "CANCELLED", "NODE_FAIL")):
        return _not_oom(Cause.PREEMPTION, f"SLURM ended it: {state}", 0.95)
    if (clues.k8s_reason or "") in _STOPPED_BY_KUBERNETES:
        return _not_oom(
            Cause.PREEMPTION, f"Kubernetes ended it: {clues.k8s_reason}", 0.9
        )
    stopped = next((hit for hit in others if hit.form.kind == "preemption"), None)
    if stopped is not None and not any(h.form.kind == "crash" for h in others):
        return _other(stopped, reading, failed)
    if (clues.signal in (None, 7) and killed and killed[-1].form.kind == "shm") and (
        clues.shm_free_bytes is None or clues.shm_free_bytes < SHM_IS_FULL
    ):
        return Verdict(
            is_oom=True, kind="shm", cause=Cause.SHM_FULL, confidence=0.7,
            summary="a process died of SIGBUS, as writing to shared memory does when "
            "/dev/shm is full", told=killed[-1].text,
        )  # fmt: skip
    told = killed[-1].text if killed else ""
    explained = any(h.form.kind not in ("peer_lost", "hang") for h in others)
    terminated = any(hit.form.kind == "preemption" for hit in killed)
    if terminated and not explained and clues.signal != 9:
        return replace(_not_oom(Cause.PREEMPTION, "it was told to end", 0.8), told=told)
    kills = any(hit.form.kind == "host_killed" for hit in killed)
    if clues.signal == 9 or (kills and not explained):
        return _of_sigkill(clues, told, reading)
    if others:
        return _other(_decisive(others), reading, failed)
    return _of_silence(clues, reading)


# A container's runtime asked the container's own cgroup.
_within_limit = re.compile(r"\bOOM ?Killed\W{1,5}(?:false|no|0)\b")


def _of_sigkill(clues: Clues, told: str, reading: Reading) -> Verdict:
    kernel = [hit for hit in reading.hits if hit.form.role == "kernel"]
    if clues.cgroup_oom_kill == 0 or (kernel and clues.worker_pids is not None):
        return replace(
            _not_oom(
                Cause.KILLED,
                "it was killed from outside (SIGKILL); the kernel did not kill it for "
                "memory",
                0.9,
            ),
            told=told,
        )
    if any(_within_limit.search(hit.text) for hit in reading.hits):
        return replace(
            _not_oom(
                Cause.KILLED,
                "it was killed from outside (SIGKILL); its container did not run out "
                "of memory (whether the host did, its dmesg tells)",
                0.6,
            ),
            told=told,
        )
    return replace(
        _host_killed(
            "it was killed (SIGKILL) without a word; the kernel's OOM killer is the "
            "likely one: see memory.events of its cgroup or dmesg",
            0.5,
        ),
        told=told,
        levers=("restart_same", "shrink_host_pipeline"),
    )


def _decisive(others: list[Hit]) -> Hit:
    """The line that says most: what names a cause before what was raised of it."""
    for kinds in (
        ("hardware", "device_fault", "no_capacity", "misconfiguration", "threads"),
        ("hang",),
        ("crash",),
        ("peer_lost",),
    ):
        for hit in others:
            if hit.form.kind in kinds:
                return _waited_for(hit, others) or hit
    return others[-1]


def _waited_for(hit: Hit, others: list[Hit]) -> Hit | None:
    """The failure of another rank, for which the rank that tells of a hang waited."""
    if hit.form.kind != "hang":
        return None
    crashes = [other for other in others if other.form.kind == "crash"]
    return next((x for x in crashes if x.line.rank not in ("", hit.line.rank)), None)


def _other(hit: Hit, reading: Reading, failed: bool) -> Verdict:
    kind = hit.form.kind
    found = _not_oom(CAUSES[kind], SUMMARIES[kind], 0.8)
    facts = _of_harmless(reading)
    if kind == "no_capacity" and hit.line.number in reading.of_rpc:
        found = replace(found, kind="grpc")
    # A graph's attribute tells where a node was placed, not what failed.
    if '_device="' not in hit.text:
        facts = together(Facts(device=reading.facts(hit, ()).device), facts)
    return replace(found, told=hit.text, facts=facts, levers=_levers(hit, failed))


def _levers(hit: Hit, failed: bool) -> tuple[str, ...]:
    """What would help, where the kind of the line tells more than its cause."""
    kind = hit.form.kind
    if kind == "no_capacity":
        return ("restart_same", "fix_code")
    if kind == "device_fault":
        return ("fix_code", "restart_same")
    if kind == "peer_lost" and "SIGSEGV" in hit.text:
        return ("fix_code",)
    # What they tell of is in another log, or in nobody's power here.
    none = kind in ("peer_lost", "hardware") or (kind == "hang" and not failed)
    return ("none",) if none or "KeyboardInterrupt" in hit.text else ()


def _of_silence(clues: Clues, reading: Reading) -> Verdict:
    code = clues.exit_code
    harmless = [hit for hit in reading.hits if hit.form.role == "harmless"]
    warned = [hit for hit in harmless if hit.form.kind == "host_allocator"]
    if warned and not code:
        return Verdict(
            is_oom=False,
            kind="host_allocator",
            cause=Cause.FINISHED if code == 0 else None,
            confidence=0.8,
            summary="a large part of host memory was asked for, and given: a warning",
            told=warned[-1].text,
            facts=reading.facts(warned[-1], ("host_allocator",)),
        )
    facts = _of_harmless(reading)
    if code == 0:
        return replace(_not_oom(Cause.FINISHED, "it finished", 0.9), facts=facts)
    if clues.signal is not None:
        name = _signal_name(clues.signal)
        cause = Cause.PREEMPTION if clues.signal in (2, 15, 24) else Cause.CRASH
        return replace(_not_oom(cause, f"it died of {name}", 0.7), facts=facts)
    if code == 75:
        return _not_oom(Cause.PREEMPTION, "it stopped by itself, to go on later", 0.8)
    if code is not None:
        return replace(
            _not_oom(
                Cause.CRASH,
                f"it failed (exit code {code}); nothing says that memory ran out",
                0.6,
            ),
            facts=facts,
        )
    summary = "nothing says that memory ran out"
    if any(hit.form.kind != "crash" for hit in reading.hits):
        summary = "memory was short, but the program went on"
        found = _not_oom(None, summary, 0.8)
        return replace(found, told=reading.hits[-1].text, facts=facts)
    return replace(_not_oom(None, summary, 0.4), facts=facts)


def _of_harmless(reading: Reading) -> Facts:
    """What was asked for, and on which device, by what did not end it."""
    found = Facts()
    for hit in reversed(reading.hits):
        if (hit.form.kind, hit.form.role) == ("xla", "harmless"):
            continue
        if hit.form.role in ("harmless", "hint", "status", "error"):
            said = replace(reading.facts(hit, ()), about_bytes=None, operation=None)
            found = together(found, said)
    return found


def _not_oom(cause: Cause | None, summary: str, confidence: float) -> Verdict:
    return Verdict(
        is_oom=False,
        kind="not_oom",
        cause=cause,
        confidence=confidence,
        summary=summary,
    )


def _signal_name(number: int) -> str:
    if number in signals.Signals._value2member_map_:
        return signals.Signals(number).name
    return f"signal {number}"
