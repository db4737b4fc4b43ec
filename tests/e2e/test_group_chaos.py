"""Workers without TensorFlow, harmed at a random moment: the run ends well."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from killable import JOB, causes, drive, events, of_this_run, wait_for

from oomrun.core import events as ev
from oomrun.core.launch import RANK
from oomrun.core.state import replay

TEXT = JOB.replace("{cpu: 1, memory: [300MiB]}", "{cpu: 2, memory: [300MiB, 100MiB]}")
TEXT += (
    "strategy: horovod\n"
    "recovery: {hang_after: 10s, max_restarts: {crash: unlimited, hang: unlimited}}\n"
)
SECONDS = 1.5  # about what either half of a run takes
FAST = range(4)
SLOW = range(4, 30)


def harm(victim: str, supervisor: int) -> None:
    """Kills the supervisor or a worker, or freezes the worker that reports for all."""
    if victim == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
        return
    rank, number = victim.split()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(supervisor).children():
            if child.environ().get(RANK) == rank:
                child.send_signal(int(number))


@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_it_ends_well_whatever_happens(seed: int, folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    chance = random.Random(seed)
    kill, stop = int(signal.SIGKILL), int(signal.SIGSTOP)
    victims = ("supervisor", f"0 {kill}", f"1 {kill}", f"0 {stop}")
    victim = victims[seed % len(victims)]
    process = drive(folder, "a-second")
    if chance.random() < 0.5:
        wait_for(folder, ev.Progressed)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(chance.uniform(0.0, SECONDS))
    if process.poll() is None:
        harm(victim, process.pid)
    code = process.wait(180)
    if victim == "supervisor" and code != 0:
        code = drive(folder, "a-second").wait(180)
    said = (folder / "said").read_text()
    assert code == 0, said
    state = replay(events(folder))
    assert state.state == "completed", said
    assert causes(folder)[-1] == "finished"
    assert of_this_run(folder) == []
    done = folder / "runs" / "killable" / "checkpoints" / "step"
    assert done.read_text() == "50"
