"""Harms groups of workers at random moments and compares what comes out.

Each run of two workers is harmed once, at a random moment between the first instant of
the command and its end: a worker is killed (SIGKILL) or frozen (SIGSTOP), the
supervisor is killed, or a neighbour takes a worker's memory before a random step. The
command is called again until it has ended. It must end with exit code 0, with the
weights of the run that nobody harmed to 1e-10 in float64, alike in both workers, and
leave no process. Prints JSON; exit code 1 where a run failed.

Usage: python -m benchmarks.group_kills [--runs 30] [--seed 0] [--keep DIR]
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import kills
from benchmarks.kills import jobs  # it makes the tests' modules importable
from oomrun.core import events as ev
from oomrun.core.launch import RANK, RUN_TOKEN

# isort: split
import wide_model

# A pass takes about 0.6 MiB a sample; the neighbour leaves 12 MiB of 30.
SCRIPT = (
    wide_model.START
    + """\
rank = os.environ["OOMRUN_RANK"]
before, whom = os.environ.get("NEIGHBOUR", "-1:").split(":")
class Neighbour(keras.callbacks.Callback):
    steps, taken = 0, None
    def on_train_batch_begin(self, batch, logs=None):
        if self.steps == int(before) and rank == whom:
            self.taken = fill((30 - 12) * 2**20)
        self.steps += 1
history = model.fit(
    x, y, batch_size=96, epochs=6, verbose=0, callbacks=[Neighbour()]
).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""
)
JOB = """\
strategy: horovod
devices: {cpu: 2, memory: [30MiB, 30MiB]}
checkpoint: {every: 3 steps}
recovery: {max_restarts: {crash: 10}, hang_after: 90s}
"""
STEPS = 18
HARMS = ("kill", "kill", "freeze", "supervisor", "neighbour")
LARGEST_DISTANCE = 1e-10


@dataclass
class Run:
    """One harmed run and what became of it."""

    number: int
    harm: str
    rank: int
    after_s: float
    before_step: int
    hit: bool = False
    exit_codes: list[int | None] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    exhaustions: int = 0
    distance: float | None = None
    alike: bool = False
    left: list[int] = field(default_factory=list)
    folder: str = ""

    @property
    def well(self) -> bool:
        near = self.distance is not None and self.distance < LARGEST_DISTANCE
        return near and self.alike and self.exit_codes[-1:] == [0] and not self.left


def undisturbed(folder: Path) -> tuple[Path, float]:
    """The weights of a run that nobody harms, and how long it takes."""
    job = jobs.make(folder, SCRIPT, JOB)
    began = time.monotonic()
    if job.run(timeout_s=kills.TIMEOUT_S) != 0:
        raise SystemExit(f"the job fails without any harm:\n{job.everything()}")
    return folder / "weights-0.npz", time.monotonic() - began


def harmed(
    folder: Path, number: int, rng: random.Random, duration_s: float, wanted: Path
) -> Run:
    """One run that is harmed at a random moment."""
    job = jobs.make(folder, SCRIPT, JOB)
    run = Run(
        number,
        rng.choice(HARMS),
        rng.randrange(2),
        rng.uniform(0.0, duration_s),
        rng.randrange(STEPS),
        folder=str(folder),
    )
    env = {"NEIGHBOUR": f"{run.before_step}:{run.rank}"}
    process = job.start(env=env if run.harm == "neighbour" else {})
    try:
        if run.harm != "neighbour":
            process.wait(run.after_s)
    except subprocess.TimeoutExpired:
        run.hit = _harm(run, process.pid)
    run.exit_codes.append(kills.wait(process))
    while run.exit_codes[-1] != 0 and len(run.exit_codes) < kills.MOST_CALLS:
        run.exit_codes.append(job.run(timeout_s=kills.TIMEOUT_S))
    if not jobs.gone(job):
        run.left = job.processes()
    run.causes = [event.cause for event in job.events(ev.AttemptEnded)]
    run.exhaustions = len(job.events(ev.OomOccurred))
    run.hit = run.hit or (run.harm == "neighbour" and run.exhaustions > 0)
    weights = [folder / f"weights-{rank}.npz" for rank in range(2)]
    if all(path.exists() for path in weights):
        run.alike = jobs.identical(*weights)
        run.distance = jobs.distance(weights[0], wanted)
    return run


def _harm(run: Run, supervisor: int) -> bool:
    """Whether the victim was there to be harmed."""
    if run.harm == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
        return True
    number = signal.SIGSTOP if run.harm == "freeze" else signal.SIGKILL
    try:
        for child in psutil.Process(supervisor).children():
            env = child.environ()
            if RUN_TOKEN in env and env.get(RANK) == str(run.rank):
                child.send_signal(number)
                return True
    except psutil.Error:
        pass
    return False


def main() -> int:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep all folders of the runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        wanted, duration_s = undisturbed(folder / "undisturbed")
        done: list[Run] = []
        for number in range(1, args.runs + 1):
            # Its own chance, so that one run can be repeated alone.
            rng = random.Random(args.seed * 100_000 + number)
            run = harmed(folder / f"run-{number:03d}", number, rng, duration_s, wanted)
            done.append(run)
            print(f"{number}: {'well' if run.well else 'NOT WELL'}: {vars(run)}",
                  file=sys.stderr)  # fmt: skip
    found: dict[str, Any] = {
        "runs": args.runs,
        "duration_s": round(duration_s, 1),
        "harmed": dict(Counter(run.harm for run in done if run.hit)),
        "not_there_to_harm": sum(not run.hit for run in done),
        "causes": dict(Counter(cause for run in done for cause in run.causes)),
        "exit_codes": dict(Counter(str(run.exit_codes) for run in done)),
        "largest_distance": max((run.distance or 0.0 for run in done), default=None),
        "well": sum(run.well for run in done),
        "failures": [vars(run) for run in done if not run.well],
    }
    print(json.dumps(found, indent=1))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
