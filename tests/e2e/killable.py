"""What tests of the supervisor share: its job, its journal, its processes.

Covers: helpers without checks. Does not cover: fixtures (``conftest``).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from oomrun import journal
from oomrun.core import events as ev
from oomrun.core.state import replay
from oomrun.rundir import RunDir
from oomrun.watched import Timing

HERE = Path(__file__).parent
WORKER = HERE / "killable_worker.py"
DRIVE = HERE / "drive.py"
JOB = """\
name: killable
script: train.py
devices: {cpu: 1, memory: [300MiB]}
batch: {global: 8}
metrics: {listen: "127.0.0.1:0"}
"""
QUICK = Timing(
    grace_s=0.5,
    kill_after_s=0.3,
    linger_s=0.3,
    failed_linger_s=0.3,
    progress_every_s=0.0,
)


def events(folder: Path) -> list[ev.Event]:
    return journal.read(RunDir(folder / "runs" / "killable").journal)


def causes(folder: Path) -> list[str]:
    return [e.cause for e in events(folder) if isinstance(e, ev.AttemptEnded)]


def of_this_run(folder: Path) -> list[int]:
    """Processes that still carry the run's id."""
    run_id = replay(events(folder)).run_id
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("OOMRUN_RUN_ID") == run_id:
                found.append(process.pid)
    return found


def drive(folder: Path, mode: str, *options: str) -> subprocess.Popen[bytes]:
    """The whole command in a process of its own; what it says goes to ``said``."""
    with open(folder / "said", "ab") as said:
        return subprocess.Popen(
            [sys.executable, str(DRIVE), mode, "job.yaml", *options],
            cwd=folder, stdout=said, stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip


def wait_for(folder: Path, kind: type[ev.Event], times: int = 1) -> None:
    until = time.monotonic() + 60
    while sum(isinstance(e, kind) for e in events(folder)) < times:
        assert time.monotonic() < until, f"no {kind.__name__} in a minute"
        time.sleep(0.02)
