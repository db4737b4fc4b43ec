"""The whole command under signals, kills and a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from killable import DRIVE, JOB, drive, events, of_this_run, wait_for

from oomrun.core import events as ev
from oomrun.core.errors import PlatformError
from oomrun.core.state import replay
from oomrun.rundir import RunDir
from oomrun.supervisor import Outcome


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
def test_a_signal_stops_the_run_to_be_resumed(
    folder: Path, number: int, code: int
) -> None:
    process = drive(folder, "stops-well")
    wait_for(folder, ev.Progressed)
    process.send_signal(number)
    assert process.wait(60) == code
    state = replay(events(folder))
    assert (state.state, state.exit_code) == ("preempted", code)
    assert drive(folder, "finishes").wait(60) == 0
    state = replay(events(folder))
    assert (state.state, state.step) == ("completed", 5)
    assert state.restarts["preemption"] == 1


@pytest.mark.parametrize("mode", ["deaf", "not-ready", "hangs"])
def test_sigterm_ends_any_worker(folder: Path, mode: str) -> None:
    process = drive(folder, mode, "--grace", "300ms")
    wait_for(folder, ev.AttemptStarted if mode == "not-ready" else ev.Progressed)
    process.terminate()
    assert process.wait(60) == 75
    assert of_this_run(folder) == []


def test_a_second_ctrl_c_does_not_wait(folder: Path) -> None:
    process = drive(folder, "deaf", "--grace", "1h")
    wait_for(folder, ev.Progressed)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    # Equal signals may arrive as one: the last one is repeated until it is heard.
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.returncode == 130
    assert of_this_run(folder) == []


def test_sigterm_ends_the_wait_before_a_restart(folder: Path) -> None:
    text = JOB + "recovery: {max_restarts: {crash: unlimited}}\n"
    (folder / "job.yaml").write_text(text)
    process = drive(folder, "exits-silently")
    wait_for(folder, ev.DecisionMade, times=4)
    process.terminate()
    assert process.wait(60) == 75


def test_a_killed_supervisor_leaves_nothing_and_is_taken_over(folder: Path) -> None:
    process = drive(folder, "slow")
    wait_for(folder, ev.Progressed)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while of_this_run(folder):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert drive(folder, "finishes").wait(60) == 0
    state = replay(events(folder))
    assert (state.state, state.attempt) == ("completed", 2)
    assert any(isinstance(e, ev.RunResumed) for e in events(folder))


def test_a_second_supervisor_is_refused_with_the_pid_of_the_first(
    folder: Path, run: Callable[..., Outcome]
) -> None:
    process = drive(folder, "slow")
    wait_for(folder, ev.Progressed)
    with pytest.raises(PlatformError, match=f"pid {process.pid}"):
        run("finishes")
    assert drive(folder, "slow").wait(60) == 4
    said = (folder / "said").read_text()
    assert f"(pid {process.pid})" in said
    assert "Traceback" not in said
    process.kill()
    process.wait()


def test_a_full_disk_ends_the_run_in_order(folder: Path) -> None:
    limits = f"ulimit -f 8; exec {sys.executable} {DRIVE} slow job.yaml"
    process = subprocess.run(
        ["bash", "-c", limits], cwd=folder, text=True, capture_output=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PROGRESS_EVERY_S": "0",
        },
    )  # fmt: skip
    assert process.returncode == 4
    assert "journal.jsonl: cannot be written: file too large" in process.stderr
    assert "Traceback" not in process.stderr
    whole = RunDir(folder / "runs" / "killable").journal.read_bytes()
    assert whole.endswith(b"\n")
    assert of_this_run(folder) == []
    assert drive(folder, "finishes").wait(60) == 0


def test_orphans_without_our_environment_die_with_the_command(folder: Path) -> None:
    assert drive(folder, "grandchildren").wait(60) == 0
    for pid in (folder / "pids").read_text().split():
        assert not psutil.pid_exists(int(pid))
