"""Waiting for memory that a dead process or a neighbour still holds.

Covers: the wait itself, and a run whose worker dies while its memory is not back, on
the library of ``nvml_library``; the worker is a command, so no TensorFlow is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jobs
from fake_machine import FREE_BYTES, answer

from nvml_library import GIB, Machine, uuid
from oomrun.core import events as ev


def test_waiting_for_a_dead_process__pitfall_30(machine: Machine) -> None:
    machine.change({"0.processes": f"41:{60 * GIB}"})
    later = threading.Timer(1.5, machine.change, [{"0.processes": None}])
    later.start()
    wait = answer(
        machine,
        f"devices.wait_until_free({uuid(0)!r}, {70 * GIB}, timeout_s=20)",
    )
    later.join()
    assert wait["reached"]
    assert wait["memory"]["free_bytes"] == FREE_BYTES
    assert wait["waited_s"] < 10


def test_waiting_ends_when_a_neighbour_took_the_memory__pitfall_30(
    machine: Machine,
) -> None:
    machine.change({"0.processes": f"41:{60 * GIB}"})
    wait = answer(
        machine,
        f"devices.wait_until_free({uuid(0)!r}, {70 * GIB}, timeout_s=0.5)",
    )
    assert not wait["reached"]
    assert wait["memory"]["free_bytes"] == FREE_BYTES - 60 * GIB
    assert 0.5 <= wait["waited_s"] < 5


def test_waiting_ends_when_the_device_is_gone(machine: Machine) -> None:
    machine.change({"fail.nvmlDeviceGetHandleByUUID.0": 15})
    wait = answer(machine, f"devices.wait_until_free({uuid(0)!r}, 1, timeout_s=300)")
    assert not wait["reached"]
    assert "the GPU is lost" in wait["memory"]["reason"]


def test_waiting_through_a_neighbours_coming_and_going__pitfall_22(
    machine: Machine,
) -> None:
    machine.change({"0.processes": f"41:{60 * GIB}"})

    def come_and_go() -> None:
        for held in (20, 50, 15, None):
            time.sleep(0.4)
            machine.change({"0.processes": held and f"42:{held * GIB}"})

    neighbour = threading.Thread(target=come_and_go)
    neighbour.start()
    wait = answer(
        machine,
        f"devices.wait_until_free({uuid(0)!r}, {70 * GIB}, timeout_s=30)",
    )
    neighbour.join()
    assert wait["reached"]
    assert wait["memory"]["free_bytes"] == FREE_BYTES


# --- a run --------------------------------------------------------------------------

# Dies like a worker that the kernel killed; what it held is the test's to give back.
PROGRAM = """
import os, pathlib, signal, time
if os.environ["OOMRUN_ATTEMPT"] == "1":
    pathlib.Path("runs-now").touch()
    while not pathlib.Path("die").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
"""
# `oomrun run`, but that it waits for memory as long as its first argument says.
DRIVE = """
import dataclasses, sys
from oomrun import launching
from oomrun.cli import main
class Job(launching.Job):
    def __init__(self, **settings):
        back_s = float(sys.argv[1])
        timing = dataclasses.replace(settings.pop("timing"), memory_back_s=back_s)
        super().__init__(timing=timing, **settings)
launching.Job = Job
sys.exit(main(sys.argv[2:]))
"""


class Run:
    """A run of two attempts on the machine, up to the death of the first."""

    def __init__(self, machine: Machine, folder: Path, devices: str, wait_s: float):
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        command = json.dumps([sys.executable, "program.py"])
        (folder / "job.yaml").write_text(
            f"name: {jobs.NAME}\ncommand: {command}\ndevices: {devices}\n{jobs.METRICS}"
        )
        self.job = jobs.Job(folder)
        self._folder = folder
        self._machine = machine
        self._wait_s = wait_s
        self._process = self._start()
        self.job.wait_for(ev.AttemptStarted)
        until = time.monotonic() + 60
        while not (folder / "runs-now").exists():
            assert time.monotonic() < until, self.job.everything()
            time.sleep(0.02)

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._folder / "said", "ab") as said:
            return subprocess.Popen(
                [sys.executable, "-c", DRIVE, str(self._wait_s), "job.yaml"],
                cwd=self._folder,
                env=jobs.environment(self._machine.environment()),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def let_die(self) -> None:
        """The first attempt dies, and it is decided to start another."""
        (self._folder / "die").touch()
        self.job.wait_for(ev.DecisionMade)

    def kill_and_start_again(self) -> None:
        """All of it dies, as where a machine's power fails, and it is called again."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()
        self.job.wait_for(ev.RunResumed)

    def end(self) -> int:
        """The exit code, once the run has ended."""
        try:
            return self._process.wait(120)
        finally:
            self._process.kill()
            self._process.wait()

    def planned(self) -> list[Any]:
        """The device of each attempt's plan."""
        started = self.job.events(ev.AttemptStarted)
        return [event.plan["devices"][0] for event in started]


def test_a_restart_waits_for_the_dead_process__pitfall_30(
    machine: Machine, tmp_path: Path
) -> None:
    run = Run(machine, tmp_path / "job", "[0]", 60)
    machine.change({"0.processes": f"41:{60 * GIB}"})
    run.let_die()
    time.sleep(3)  # as long as a driver may take to tidy up
    assert len(run.planned()) == 1, run.job.everything()
    machine.change({"0.processes": None})
    assert run.end() == 0, run.job.everything()
    first, second = run.planned()
    assert second["limit_bytes"] == first["limit_bytes"]


def test_a_run_taken_up_waits_for_the_lost_attempts_memory__pitfall_30(
    machine: Machine, tmp_path: Path
) -> None:
    run = Run(machine, tmp_path / "job", "[0]", 60)
    machine.change({"0.processes": f"41:{60 * GIB}"})
    run.kill_and_start_again()
    time.sleep(3)
    assert len(run.planned()) == 1, run.job.everything()
    machine.change({"0.processes": None})
    assert run.end() == 0, run.job.everything()
    first, second = run.planned()
    assert second["limit_bytes"] == first["limit_bytes"]


def test_a_restart_fits_beside_a_neighbour_that_stays__pitfall_22(
    machine: Machine, tmp_path: Path
) -> None:
    run = Run(machine, tmp_path / "job", "[0]", 1)
    machine.change({"0.processes": f"41:{60 * GIB}"})
    run.let_die()
    assert run.end() == 0, run.job.everything()
    first, second = run.planned()
    assert second["limit_bytes"] == first["limit_bytes"] - 60 * GIB


GONE = {
    "fail.nvmlDeviceGetHandleByUUID.0": 15,
    "fail.nvmlDeviceGetHandleByIndex_v2.0": 15,
}


def test_a_gpu_that_vanishes_leaves_the_others(
    machine: Machine, tmp_path: Path
) -> None:
    run = Run(machine, tmp_path / "job", "gpu", 60)
    machine.change(GONE)
    run.let_die()
    assert run.end() == 0, run.job.everything()
    assert [device["id"] for device in run.planned()] == [uuid(0), uuid(1)]


def test_the_only_gpu_that_vanishes_ends_the_run_with_words(
    library: Path, tmp_path: Path
) -> None:
    machine = Machine(library, tmp_path / "machine.txt", gpus=1)
    run = Run(machine, tmp_path / "job", "gpu", 60)
    machine.change(GONE)
    run.let_die()
    assert run.end() == 3, run.job.everything()
    assert "there is no usable GPU (GPU 0 (unknown GPU): the GPU is" in run.job.said()
