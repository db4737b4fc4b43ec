"""From a log and what else is known of its end to what went wrong: for any program.

Covers: ``judge``, a function of the text, the exit code and the counters that a kernel
or a scheduler kept. Does not cover: the log alone (``judging_text``), an end without a
word of memory (``judging_end``), what would help (``remedies``), an attempt of our own,
whose worker reports (``diagnosis``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from oomrun.core import remedies
from oomrun.core.causes import Cause
from oomrun.core.judging_end import by_end, host_killed
from oomrun.core.judging_summaries import FILE_SIZE
from oomrun.core.judging_text import by_text, decisive_error, warned_of
from oomrun.core.log_facts import Facts, only_device, together
from oomrun.core.log_lines import lines
from oomrun.core.log_reading import DEVICE_KINDS, Reading, read
from oomrun.core.verdict import SHM_IS_FULL, Clues, Verdict

__all__ = ["judge"]


def judge(clues: Clues) -> Verdict:
    """What went wrong: counters and states first, then what the log says."""
    reading = read(clues.text)
    clues = _with_counter(clues, reading)
    found = _by_counters(clues, reading) or by_text(clues, reading)
    if found is None:
        found = by_end(clues, reading)
    signs = remedies.signs(clues.text, reading, found.facts, clues.other_pids_on_device)
    if found.facts.device is None and _of_the_device(found, reading):
        only = Facts(device=only_device(clues.text))
        found = replace(found, facts=together(found.facts, only))
    phase = remedies.phase(clues.text, found.facts) if found.is_oom else "unknown"
    if found.kind == "gpu_context" and not reading.progress:
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
    if "disk_full" in signs:
        levers = (*levers, "fix_disk")
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
        return host_killed("the kernel killed it: host memory ran out", 0.99, told)
    error = decisive_error(clues, reading)
    device = error is not None and error.form.kind in DEVICE_KINDS
    killed = clues.signal == 9
    if (clues.k8s_reason or "").lower() == "oomkilled" and (killed or not device):
        return host_killed(
            "Kubernetes killed the container: it used more host memory than its limit",
            0.98,
        )
    if (clues.slurm_state or "").upper().startswith("OUT_OF_ME") and not device:
        return host_killed(
            "SLURM counts an OOM kill: host memory ran out (OUT_OF_MEMORY)", 0.98
        )
    if (clues.cgroup_oom_kill or 0) > 0 and (killed or error is None):
        many = "a process" if clues.cgroup_oom_kill == 1 else "processes"
        return host_killed(
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
