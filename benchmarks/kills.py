"""Kills a small job at random moments, calls it again, and compares what comes out.

Each run kills the supervisor or the worker (SIGKILL) once, at a random moment between
the first instant of the command and its end, then calls ``oomrun job.yaml`` again until
it has ended. It must end with exit code 0, with the very weights of the run that nobody
killed, and leave no process behind. Prints JSON; exit code 1 where a run failed.

With ``--in-sequence N`` it is one job that is killed N times (``kill_sequence``).

Usage: python -m benchmarks.kills [--runs 50 | --in-sequence 500] [--seed 0]
    [--most TIME] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

import jobs

from oomrun.core import events as ev
from oomrun.core import units
from oomrun.core.errors import JournalError
from oomrun.core.state import replay

SCRIPT = """\
import keras
import numpy as np

keras.utils.set_random_seed(13)
rng = np.random.default_rng(0)
model = keras.Sequential([
    keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
x = rng.normal(size=(128, 8))
stopping = keras.callbacks.EarlyStopping(
    patience=4, min_delta=0.01, restore_best_weights=True
)
history = model.fit(
    x, (x ** 2).sum(1, keepdims=True), batch_size=8, epochs=30, validation_split=0.2,
    verbose=2, callbacks=[stopping],
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
"""
JOB = """\
devices: {cpu: 1, memory: 200MiB}
checkpoint: {every: 3 steps}
recovery: {max_restarts: {crash: 10}}
"""
MOST_CALLS = 5
TIMEOUT_S = 600.0


@dataclass
class Run:
    """One killed run and what became of it."""

    number: int
    victim: str
    after_s: float
    phase: str = "before the run began"
    hit: bool = False
    exit_codes: list[int | None] = field(default_factory=list)
    identical: bool = False
    left: list[int] = field(default_factory=list)
    folder: str = ""

    @property
    def well(self) -> bool:
        return self.identical and self.exit_codes[-1:] == [0] and not self.left


def undisturbed(folder: Path) -> tuple[Path, float]:
    """The weights of a run that nobody kills, and how long it takes."""
    job = jobs.make(folder, SCRIPT, JOB)
    began = time.monotonic()
    code = job.run(timeout_s=TIMEOUT_S)
    took_s = time.monotonic() - began
    if code != 0:
        raise SystemExit(f"the job fails without any kill:\n{job.everything()}")
    return folder / "weights.npz", took_s


def killed(
    folder: Path, number: int, rng: random.Random, duration_s: float, wanted: Path
) -> Run:
    """One run whose supervisor or worker is killed at a random moment."""
    job = jobs.make(folder, SCRIPT, JOB)
    victim = rng.choice(("supervisor", "worker"))
    run = Run(number, victim, rng.uniform(0.0, duration_s), folder=str(folder))
    process = job.start()
    try:
        process.wait(run.after_s)
    except subprocess.TimeoutExpired:
        run.hit = kill(job, process.pid, victim)
    run.phase = _phase(job)
    run.exit_codes.append(wait(process))
    while run.exit_codes[-1] != 0 and len(run.exit_codes) < MOST_CALLS:
        run.exit_codes.append(job.run(timeout_s=TIMEOUT_S))
    if not jobs.gone(job):
        run.left = job.processes()
    weights = folder / "weights.npz"
    run.identical = weights.exists() and jobs.identical(weights, wanted)
    return run


def kill(job: jobs.Job, supervisor: int, victim: str) -> bool:
    """Whether the victim was there to be killed."""
    if victim == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
        return True
    for pid in _workers(job, supervisor):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        return True
    return False


def _workers(job: jobs.Job, supervisor: int) -> Iterator[int]:
    try:
        for child in psutil.Process(supervisor).children():
            yield child.pid
    except psutil.NoSuchProcess:
        return


def _phase(job: jobs.Job) -> str:
    """What the run was at, by its journal, when the kill came."""
    try:
        state = replay(job.events())
    except JournalError:
        return "before the run began"
    if not state.run_id:
        return "before the run began"
    ended = any(isinstance(e, ev.FitEnded) for e in job.events())
    return "after fit" if ended else state.state


def wait(process: Any, timeout_s: float = TIMEOUT_S) -> int | None:
    """The exit code; None where it does not end in time, and is killed."""
    try:
        return int(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def kills(folder: Path, runs: int, seed: int) -> dict[str, Any]:
    """All runs, and the summary that is printed."""
    rng = random.Random(seed)
    wanted, duration_s = undisturbed(folder / "undisturbed")
    done: list[Run] = []
    for number in range(1, runs + 1):
        run = killed(folder / f"run-{number:03d}", number, rng, duration_s, wanted)
        done.append(run)
        print(
            f"{number}/{runs}: {run.victim} after {run.after_s:.1f} s ({run.phase}): "
            f"exit codes {run.exit_codes}, {'well' if run.well else 'NOT WELL'}",
            file=sys.stderr,
        )
    return {
        "runs": runs,
        "duration_s": round(duration_s, 1),
        "supervisor_kills": sum(r.hit and r.victim == "supervisor" for r in done),
        "worker_kills": sum(r.hit and r.victim == "worker" for r in done),
        "not_there_to_kill": sum(not r.hit for r in done),
        "kills_at": dict(Counter(r.phase for r in done if r.hit)),
        "exit_codes": dict(Counter(str(r.exit_codes) for r in done)),
        "identical": sum(r.identical for r in done),
        "failures": [vars(r) for r in done if not r.well],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--runs", type=int, default=50, help="runs, each killed once")
    many.add_argument("--in-sequence", type=int, metavar="N", help="kills of one job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most", type=units.parse_duration, metavar="TIME",
        help="with --in-sequence: no kill any more after this time",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, help="keep all folders of the runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        if args.in_sequence is None:
            found = kills(folder, args.runs, args.seed)
            well = not found["failures"]
        else:
            # It stands on this module.
            from benchmarks import kill_sequence

            found = kill_sequence.in_sequence(
                folder, args.in_sequence, args.seed, args.most
            )
            well = kill_sequence.well(found)
    print(json.dumps(found, indent=1))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
