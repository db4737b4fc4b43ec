"""Evidence -> cause: facts beat text, and a report beats how it died."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from oomrun.core import events as ev
from oomrun.core.diagnosis import Cause, Evidence, diagnose, looks_like_device_oom

LOGS = Path(__file__).parents[1] / "data" / "oom_logs.jsonl"


def script(outcome: str = "raised", **fields: Any) -> ev.ScriptEnded:
    body = {"exit_code": 1, **fields}
    return ev.ScriptEnded(at=1.0, attempt=1, rank=0, outcome=outcome, **body)


def oom(recovery: str = "restart", kind: str = "device") -> ev.OomOccurred:
    return ev.OomOccurred(
        at=1.0, attempt=1, rank=0, device="cpu:0", kind=kind, phase="gradients",
        recovery=recovery, micro_batch_size=64, step=3, message="",
    )  # fmt: skip


FINISHED = script("finished", exit_code=0)

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


def test_a_crash_is_told_by_its_place_and_first_line() -> None:
    report = script(exception="ValueError", location="train.py:7", message="bad\nmore")
    found = diagnose(Evidence(exit_code=1, script=report))
    assert found.summary == "ValueError at train.py:7: bad"


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_budget(cause: Cause) -> None:
    assert cause.budget in ("oom", "crash", "preemption", "hang")


LABELLED = [json.loads(line) for line in LOGS.read_text().splitlines()]


@pytest.mark.parametrize("log", LABELLED, ids=[log["id"] for log in LABELLED])
def test_device_oom_is_told_from_text(log: dict[str, Any]) -> None:
    assert looks_like_device_oom(log["text"]) is log["device_oom"]
