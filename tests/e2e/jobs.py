"""A job in a folder of its own, run by the real command: written, run, looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from oomrun import journal
from oomrun.core import events as ev
from oomrun.core.launch import RUN_TOKEN
from oomrun.core.state import replay
from oomrun.rundir import RunDir

NAME = "small"
OOMRUN = (sys.executable, "-m", "oomrun")
# What oomrun sets for a CPU device with a limit; other kernels round differently.
PLAIN = {"TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
METRICS = 'metrics: {listen: "127.0.0.1:0"}\n'

E = TypeVar("E", bound=ev.Event)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, quiet, and without what would change how a script trains."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(extra or {})}
    env.pop("PYTHONHASHSEED", None)
    # Wherever oomrun itself is imported from, it is in the command too.
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return env


@dataclass(frozen=True)
class Job:
    """A folder with ``train.py`` and ``job.yaml``, and the run in it."""

    folder: Path

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "runs" / NAME)

    def start(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """``oomrun job.yaml`` in a process of its own; what it says goes to a file.

        ``inside`` are words to put before the command.
        """
        argv = [*inside, *OOMRUN, "job.yaml", "--view", "plain", *options]
        # What another test has learnt of a model must not change this one.
        env = {"XDG_CACHE_HOME": str(self.folder / "cache"), **(env or {})}
        with open(self.folder / "said", "ab") as said:
            return subprocess.Popen(
                argv,
                cwd=self.folder,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def run(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300,
    ) -> int:
        """``oomrun job.yaml`` to its end; the exit code."""
        process = self.start(*options, env=env)
        try:
            return process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def said(self) -> str:
        """All that ``oomrun`` printed, over all its calls."""
        return (self.folder / "said").read_text()

    def log(self, attempt: int) -> str:
        """What the script printed in an attempt."""
        return self.run_dir.attempt(attempt).log().read_text()

    def everything(self) -> str:
        """For the message of a failed assertion."""
        logs = sorted(self.run_dir.path.glob("attempts/*/*.log"))
        texts = [f"--- {path}\n{path.read_text()[-3000:]}" for path in logs]
        said = self.said()[-3000:] if (self.folder / "said").exists() else ""
        return "\n".join([said, *texts])

    def status(self) -> dict[str, Any]:
        """``oomrun status RUN_DIR --json``."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "oomrun",
                "status",
                str(self.run_dir.path),
                "--json",
            ],
            cwd=self.folder,
            env=environment(),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def events(self, kind: type[E] = ev.Event) -> list[E]:  # type: ignore[assignment]
        """The events of one kind so far."""
        found = journal.read(self.run_dir.journal)
        return [event for event in found if isinstance(event, kind)]

    def wait_for(
        self, kind: type[E], wanted: Callable[[E], bool] = lambda _: True
    ) -> E:
        """The first such event, within two minutes."""
        until = time.monotonic() + 120
        while True:
            for event in self.events(kind) if self.run_dir.journal.exists() else []:
                if wanted(event):
                    return event
            assert time.monotonic() < until, f"no {kind.__name__}\n{self.everything()}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Living processes that carry the run's id in their environment."""
        if not self.run_dir.journal.exists():
            return []
        return carrying(replay(self.events()).run_id)


def carrying(run_id: str) -> list[int]:
    """Living processes with this run's id in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ().get(RUN_TOKEN) == run_id
            if run_id and own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def gone(job: Job, within_s: float = 10.0) -> bool:
    """Whether no process of the run is left, or will be in a moment."""
    until = time.monotonic() + within_s
    while job.processes():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def make(folder: Path, script: str, job: str) -> Job:
    """Writes ``train.py`` and ``job.yaml`` (whose name is added)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    text = f"name: {NAME}\nscript: train.py\n{job}"
    if "metrics:" not in text:
        text += METRICS
    (folder / "job.yaml").write_text(text)
    return Job(folder)


def python(
    script: Path, *args: str, cwd: Path, env: Mapping[str, str] | None = None
) -> None:
    """``python train.py``, as it is without oomrun."""
    # Benchmarks, which import this module in other ways, run no script so.
    import scripts_alone

    settings = {**environment(env), **PLAIN}
    code, printed = scripts_alone.run(script, args, cwd, settings)
    assert code == 0, printed


def arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    """The arrays of an ``.npz``, in their order."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def distance(one: Path, other: Path) -> float:
    """The largest difference relative to the norm of its array."""
    pairs = list(zip(arrays(one), arrays(other), strict=True))
    assert pairs
    return max(
        float(np.abs(a - b).max() / max(np.linalg.norm(b), 1e-300)) for a, b in pairs
    )


def identical(one: Path, other: Path) -> bool:
    """Whether all arrays are the same to the last bit."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in pairs)
