"""How a program ended of which nothing says that memory ran out.

Covers: exit codes, kills without a word, failures of other kinds, silence. Does not
cover: counters (``judging``), what says that memory ran out (``judging_text``).
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import replace

from oomrun.core.causes import Cause
from oomrun.core.judging_summaries import CAUSES, SUMMARIES
from oomrun.core.log_facts import Facts, together
from oomrun.core.log_reading import Hit, Reading
from oomrun.core.verdict import SHM_IS_FULL, Clues, Verdict

__all__ = ["by_end", "host_killed"]

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


def by_end(clues: Clues, reading: Reading) -> Verdict:
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
    if killed and _of_sigbus(clues, killed[-1]):
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


def _of_sigbus(clues: Clues, killed: Hit) -> bool:
    """Whether a process died as it does of a full /dev/shm, and that may be full."""
    if clues.signal not in (None, 7) or killed.form.kind != "shm":
        return False
    return clues.shm_free_bytes is None or clues.shm_free_bytes < SHM_IS_FULL


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
        host_killed(
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
        ("hardware", "device_fault", "no_capacity", "threads"),
        ("misconfiguration",),
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


# Signals of a fault of its own: an illegal instruction, a division, a wrong address.
_own_fault = re.compile(r"SIGSEGV|SIGILL|SIGFPE|\bsignal (?:4|8|11)\b")


def _levers(hit: Hit, failed: bool) -> tuple[str, ...]:
    """What would help, where the kind of the line tells more than its cause."""
    kind = hit.form.kind
    if kind == "no_capacity":
        return ("restart_same", "fix_code")
    if kind == "device_fault":
        return ("fix_code", "restart_same")
    if kind == "peer_lost" and _own_fault.search(hit.text):
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
            first = reading.facts(reading.first_of_ladder(hit), ())
            said = together(first, reading.facts(hit, ()))
            found = together(found, replace(said, about_bytes=None, operation=None))
    return found


def host_killed(summary: str, confidence: float, told: str = "") -> Verdict:
    return Verdict(
        is_oom=True,
        kind="host_killed",
        cause=Cause.HOST_OOM,
        confidence=confidence,
        summary=summary,
        told=told,
    )


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
