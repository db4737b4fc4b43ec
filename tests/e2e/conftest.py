"""Fixtures: a job whose worker is ``killable_worker``; a machine with our NVML."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killable import JOB, QUICK, WORKER

import nvml_library
from nvml_library import Machine
from oomrun.core.jobfile import load
from oomrun.launching import Job
from oomrun.rundir import RunDir
from oomrun.stops import Stops
from oomrun.supervisor import Outcome, supervise


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Machine:
    return Machine(library, tmp_path / "machine.txt")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stops() -> Iterator[Stops]:
    made = Stops()
    yield made
    made.close()


@pytest.fixture
def run(folder: Path, stops: Stops) -> Callable[..., Outcome]:
    """Supervises one job in this process."""

    def call(mode: str, *, text: str = JOB, **settings: Any) -> Outcome:
        observers = settings.pop("observers", ())
        job = Job(
            spec=load(text, filename="job.yaml", environment={}),
            job_text=text.encode(),
            cwd=folder,
            environment=os.environ,
            worker_argv=(sys.executable, str(WORKER), mode),
            **{
                "job_file": folder / "job.yaml",
                "run_dir": RunDir(folder / "runs" / "killable"),
                "timing": QUICK,
                **settings,
            },
        )
        return supervise(job, stops=stops, observers=observers)

    return call
