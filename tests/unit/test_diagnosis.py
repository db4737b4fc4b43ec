"""Evidence -> cause: facts beat text, and a report beats how it died."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from oomrun.core import events as ev
from oomrun.core.diagnosis import Cause, Evidence, diagnose


def script(outcome: str = "raised", **fields: Any) -> ev.ScriptEnded:
    body = {"exit_code": 1, **fields}
    return ev.ScriptEnded(at=1.0, attempt=1, rank=0, outcome=outcome, **body)


def oom(recovery: str = "restart", kind: str = "device") -> ev.OomOccurred:
    return ev.OomOccurred(
        at=1.0, attempt=1, rank=0, device="cpu:0", kind=kind, phase="gradients",
        recovery=recovery, micro_batch_size=64, step=3, message="",
    )  # fmt: skip


FINISHED = script("finished", exit_code=0)
LEAK = ev.LeakFound(
    at=1.0, attempt=1, device="cpu:0", step=80, bytes_per_step=2**20,
    grown_bytes=80 * 2**20, budget_bytes=2**27, steps_left=9,
)  # fmt: skip

CASES = [
    ("finished", Evidence(exit_code=0, script=FINISHED), Cause.FINISHED),
    ("abort after a report", Evidence(signal=6, script=FINISHED), Cause.FINISHED),
    (
        "killed for host memory after a report",
        Evidence(signal=9, script=FINISHED, host_oom_kills=1),
        Cause.FINISHED,
    ),
    (
        "sys.exit(0)",
        Evidence(exit_code=0, script=script("exited", exit_code=0)),
        Cause.FINISHED,
    ),
    ("sys.exit(2)", Evidence(script=script("exited", exit_code=2)), Cause.CRASH),
    (
        "a full disk",
        Evidence(
            script=script(
                exception="OSError", message="[Errno 28] No space left on device"
            )
        ),
        Cause.DISK_FULL,
    ),
    (
        "a graph above 2 GB",
        Evidence(
            script=script(
                exception="ValueError",
                message="GraphDef cannot be larger than 2GB.",
            )
        ),
        Cause.GRAPH_LIMIT,
    ),
    (
        "a command with a full /dev/shm",
        Evidence(
            exit_code=1,
            command=True,
            log_tail="RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus "
            "error. It is possible that dataloader's workers are out of shared memory.",
        ),
        Cause.SHM_FULL,
    ),
    ("an exception", Evidence(script=script(exception="ValueError")), Cause.CRASH),
    ("stopped", Evidence(script=script("stopped", exit_code=0)), Cause.PREEMPTION),
    ("stopped, no report", Evidence(signal=15, stop_requested=True), Cause.PREEMPTION),
    ("OOM outside fit", Evidence(script=script(oom=True)), Cause.DEVICE_OOM),
    (
        "MemoryError",
        Evidence(script=script(oom=True, exception="MemoryError")),
        Cause.HOST_OOM,
    ),
    ("OOM, restart", Evidence(exit_code=70, oom=oom()), Cause.DEVICE_OOM),
    ("OOM, then killed", Evidence(signal=9, oom=oom()), Cause.DEVICE_OOM),
    ("host OOM", Evidence(exit_code=70, oom=oom(kind="host")), Cause.HOST_OOM),
    (
        "an OOM that was recovered from, then killed",
        Evidence(signal=9, oom=oom("in_process")),
        Cause.KILLED,
    ),
    ("the kernel's OOM kill", Evidence(signal=9, host_oom_kills=1), Cause.HOST_OOM),
    ("SIGKILL", Evidence(signal=9), Cause.KILLED),
    ("SIGSEGV", Evidence(signal=signal.SIGSEGV), Cause.CRASH),
    (
        "SIGABRT after an OOM line",
        Evidence(signal=6, log_tail="OOM when allocating tensor with shape[1]"),
        Cause.DEVICE_OOM,
    ),
    (
        "SIGABRT after bad_alloc",
        Evidence(
            signal=6,
            log_tail="terminate called after throwing an instance of 'std::bad_alloc'\n"
            "  what():  std::bad_alloc\nFatal Python error: Aborted\n",
        ),
        Cause.HOST_OOM,
    ),
    ("SIGBUS", Evidence(signal=7), Cause.CRASH),
    (
        "SIGBUS and a full /dev/shm",
        Evidence(signal=7, shm_free_bytes=0),
        Cause.SHM_FULL,
    ),
    (
        "SIGBUS and room in /dev/shm",
        Evidence(signal=7, shm_free_bytes=2**30),
        Cause.CRASH,
    ),
    (
        "no room, and /dev/shm has none",
        Evidence(
            script=script(
                exception="OSError", message="[Errno 28] No space left on device"
            ),
            shm_free_bytes=0,
        ),
        Cause.SHM_FULL,
    ),
    (
        "no room on a disk, and /dev/shm has none",
        Evidence(
            script=script(
                exception="OSError",
                message="[Errno 28] No space left on device: '/data/model'",
            ),
            shm_free_bytes=0,
        ),
        Cause.DISK_FULL,
    ),
    (
        "SIGBUS of a command and a full /dev/shm",
        Evidence(exit_code=135, command=True, shm_free_bytes=0),
        Cause.SHM_FULL,
    ),
    ("a leak", Evidence(exit_code=70, leak=LEAK), Cause.LEAK),
    ("a leak too fast to be seen", Evidence(leak=LEAK, oom=oom()), Cause.LEAK),
    (
        "a leak, but the script ended",
        Evidence(exit_code=0, leak=LEAK, script=FINISHED),
        Cause.FINISHED,
    ),
    ("an unknown signal", Evidence(signal=63), Cause.CRASH),
    ("silence", Evidence(signal=15, timed_out=True), Cause.HANG),
    ("never ready", Evidence(exit_code=3, ready=False), Cause.MISCONFIGURATION),
    ("exit 0 without a report", Evidence(exit_code=0), Cause.CRASH),
    (
        "exit 1 and an OOM line",
        Evidence(exit_code=1, log_tail="CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        Cause.DEVICE_OOM,
    ),
]


@pytest.mark.parametrize(
    ("evidence", "cause"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_causes(evidence: Evidence, cause: Cause) -> None:
    found = diagnose(evidence)
    assert found.cause is cause
    assert found.summary
    assert "\n" not in found.summary


def test_of_a_script_that_finished_it_is_told_that_its_process_was_ended() -> None:
    ended = diagnose(Evidence(signal=9, script=FINISHED))
    assert ended.cause is Cause.FINISHED
    assert ended.summary == (
        "the script finished; SIGKILL ended its process before its threads and exit "
        "handlers were done"
    )


def test_a_crash_is_told_by_its_place_and_first_line() -> None:
    report = script(exception="ValueError", location="train.py:7", message="bad\nmore")
    found = diagnose(Evidence(exit_code=1, script=report))
    assert found.summary == "ValueError at train.py:7: bad"


def test_a_leak_is_told_with_what_it_took_and_when_it_would_have_ended() -> None:
    assert "grew by 80MiB" in diagnose(Evidence(leak=LEAK)).summary
    assert "in about 9 steps" in diagnose(Evidence(leak=LEAK)).summary
    of_host = replace(LEAK, device="host")
    assert "memory of the host in use" in diagnose(Evidence(leak=of_host)).summary
    out = diagnose(Evidence(leak=replace(LEAK, steps_left=0)))
    assert out.summary.endswith("it ran out")


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_budget(cause: Cause) -> None:
    assert cause.budget in ("oom", "crash", "preemption", "hang", "leak")


# --- commands -----------------------------------------------------------------------

TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def command(**seen: Any) -> Evidence:
    return Evidence(**{"command": True, "device": "GPU-1", **seen})


COMMANDS = [
    ("finished", command(exit_code=0), Cause.FINISHED),
    ("an OOM it survived", command(exit_code=0, log_tail=TORCH), Cause.FINISHED),
    ("exit 3", command(exit_code=3), Cause.CRASH),
    ("SIGSEGV", command(signal=11), Cause.CRASH),
    ("a shell's SIGSEGV", command(exit_code=139), Cause.CRASH),
    ("device OOM", command(exit_code=1, log_tail=TORCH), Cause.DEVICE_OOM),
    ("abort after an OOM", command(signal=6, log_tail=TORCH), Cause.DEVICE_OOM),
    ("its own code for it", command(exit_code=79), Cause.DEVICE_OOM),
    ("host OOM", command(exit_code=1, log_tail="MemoryError"), Cause.HOST_OOM),
    (
        "host memory is the CPU's",
        command(exit_code=1, log_tail="MemoryError", device="cpu:0"),
        Cause.DEVICE_OOM,
    ),
    ("the kernel's kill", command(exit_code=137, host_oom_kills=1), Cause.HOST_OOM),
    ("a killed child", command(exit_code=1, host_oom_kills=1), Cause.HOST_OOM),
    (
        "the kernel's kill on a CPU",
        command(signal=9, host_oom_kills=1, device="cpu:0"),
        Cause.DEVICE_OOM,
    ),
    ("SIGKILL", command(signal=9), Cause.KILLED),
    ("a shell's SIGKILL", command(exit_code=137), Cause.KILLED),
    ("a facts beats text", command(signal=9, log_tail=TORCH), Cause.KILLED),
    ("stopped, with 0", command(exit_code=0, stop_requested=True), Cause.PREEMPTION),
    ("stopped, with 75", command(exit_code=75, stop_requested=True), Cause.PREEMPTION),
    ("stopped by SIGTERM", command(signal=15, stop_requested=True), Cause.PREEMPTION),
    ("stopped by itself", command(exit_code=75), Cause.PREEMPTION),
    ("silence", command(signal=15, timed_out=True), Cause.HANG),
    ("never started", command(exit_code=127, ready=False), Cause.MISCONFIGURATION),
    ("exit 127 of its own", command(exit_code=127), Cause.CRASH),
    ("exit 255", command(exit_code=255), Cause.CRASH),
]


@pytest.mark.parametrize(
    ("evidence", "cause"), [c[1:] for c in COMMANDS], ids=[c[0] for c in COMMANDS]
)
def test_causes_of_commands(evidence: Evidence, cause: Cause) -> None:
    found = diagnose(evidence)
    assert found.cause is cause
    assert found.summary
    assert "\n" not in found.summary


def test_a_command_s_crash_is_told_by_its_last_words() -> None:
    found = diagnose(command(exit_code=3, log_tail="a\nValueError: \x1b[31mbad\n\n"))
    assert found.summary == "the program exited with 3: ValueError:  [31mbad"
    told = diagnose(command(exit_code=1, log_tail=f"x\n{TORCH}\nbye"))
    assert told.summary == f"GPU-1 ran out of memory ({TORCH})"


def test_the_text_of_an_oom_counts_for_a_worker_that_could_not_tell() -> None:
    died = Evidence(exit_code=1, log_tail=TORCH)
    assert diagnose(died).cause is Cause.DEVICE_OOM
    benign = Evidence(
        exit_code=1,
        log_tail="Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.37GiB. "
        "The caller indicates that this is not a failure",
    )
    assert diagnose(benign).cause is Cause.CRASH
