"""Kills one job again and again, and compares what comes out in the end.

Covers: ``kills --in-sequence``: moments drawn by seed, a part of them in start-up and
the others some steps after the attempt began to train, so that the job moves on between
kills; the supervisor or the worker (SIGKILL) each time. Does not cover: many jobs, each
killed once (``kills``).
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kills import TIMEOUT_S, jobs, kill, wait
from oomrun import journal
from oomrun.core import events as ev

__all__ = ["in_sequence", "well"]

# A step takes PACE_S at least: a fast machine comes no further between kills than the
# job is long. An epoch has 13 steps, the last of them partial.
SCRIPT = """\
import os
import time
import keras
import numpy as np

keras.utils.set_random_seed(13)
rng = np.random.default_rng(0)
model = keras.Sequential([
    keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3),
    keras.layers.BatchNormalization(), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.02, use_ema=True), "mse", metrics=["mae"])
x = rng.normal(size=(128, 8))

class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("PACE_S", "0")))

history = model.fit(
    x, (x ** 2).sum(1, keepdims=True), batch_size=8, epochs=EPOCHS,
    validation_split=0.2, verbose=0,
    callbacks=[Pace(), keras.callbacks.ReduceLROnPlateau(patience=20)],
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
"""
JOB = """\
devices: {cpu: 1, memory: 200MiB}
memory: {probe: never}
checkpoint: {every: 5 steps}
recovery: {max_restarts: {crash: unlimited}}
"""
PACE_S = 0.01
# After so many steps of an attempt, and some time that is no step's, it is killed. It
# loses those that no checkpoint had yet. (By time alone a busy machine would not move.)
LEAST_STEPS, MOST_STEPS, THEN_S = 6, 30, 0.1
STEPS_A_KILL, STEPS_AN_EPOCH = 25, 13
IN_START_UP = 0.3
VICTIMS = ("supervisor", "worker")


@dataclass(frozen=True)
class Kill:
    """One kill that hit."""

    victim: str
    moment: str  # "start-up" or "training"
    attempt: int
    step: int


class _Life:
    """The command while it lives, and what its journal says of the current attempt."""

    def __init__(self, job: jobs.Job) -> None:
        self._job = job
        self._follower = journal.Follower(job.run_dir.journal)
        self._killed = 0  # the attempt that was
        self.calls = self.attempt = self.step = 0
        self.moved = 0  # steps of the attempt that lives
        self._from: int | None = None
        self.fit_ended = False
        self.process = self._call()

    def _call(self) -> subprocess.Popen[bytes]:
        self.calls += 1
        return self._job.start(env={"PACE_S": str(PACE_S)})

    @property
    def over(self) -> bool:
        """Whether nothing is left to be killed."""
        return self.fit_ended or self.process.poll() == 0

    def look(self) -> None:
        """Reads what is new; calls the command again where it was killed."""
        if self.process.poll() not in (None, 0):
            self.process = self._call()
        for event in self._follower.news()[0]:
            match event:
                case ev.AttemptStarted():
                    self.attempt = event.attempt
                case ev.Progressed() | ev.CheckpointSaved():
                    self._move(event.attempt, event.step)
                case ev.FitEnded():
                    self.fit_ended = True

    def _move(self, attempt: int, step: int) -> None:
        self.step = step
        # What the one that was killed has still said does not count.
        if attempt > self._killed:
            self._from = step if self._from is None else self._from
            self.moved = 1 + step - self._from

    def killed(self, victim: str) -> None:
        """The victim was killed just now."""
        if victim == "supervisor":
            self.process.wait()
        self._killed, self.moved, self._from = self.attempt, 0, None

    def wait_for_steps(self, steps: int) -> None:
        """Until an attempt has made them that was not killed yet, or it is over."""
        until = time.monotonic() + TIMEOUT_S
        while self.moved < steps and not self.over:
            self.look()
            if time.monotonic() > until:
                raise SystemExit(f"no training any more:\n{self._job.everything()}")
            time.sleep(0.02)


def in_sequence(
    folder: Path, wanted_kills: int, seed: int, most_s: float | None = None
) -> dict[str, Any]:
    """Kills one job ``wanted_kills`` times, and the summary that is printed.

    Args:
        folder: for the runs.
        wanted_kills: so many, while it trains.
        seed: of the moments and the victims.
        most_s: no kill any more after so many seconds; the job is then let go on.
    """
    steps = STEPS_A_KILL * wanted_kills
    script = SCRIPT.replace("EPOCHS", str(max(2, steps // STEPS_AN_EPOCH)))
    seldom = JOB.replace("every: 5 steps", "every: 1000 steps")
    plain = jobs.make(folder / "undisturbed", script, seldom)
    if plain.run(timeout_s=TIMEOUT_S + steps) != 0:
        raise SystemExit(f"the job fails without any kill:\n{plain.everything()}")
    job = jobs.make(folder / "killed", script, JOB)
    began = time.monotonic()
    until = began + (most_s or float("inf"))
    life = _Life(job)
    hits = _kill_all(job, life, wanted_kills, random.Random(seed), until)
    killing_s = time.monotonic() - began
    codes = [wait(life.process, TIMEOUT_S + steps)]
    while codes[-1] != 0 and len(codes) < 3:
        codes.append(job.run(timeout_s=TIMEOUT_S + steps))
    left = [] if jobs.gone(job) else job.processes()
    return {
        "wanted_kills": wanted_kills,
        **_summary(hits),
        "calls": life.calls + len(codes) - 1,
        "attempts": job.status()["attempts"],
        "step": job.status()["step"],
        "lost_steps": sum(event.lost_steps for event in job.events(ev.Restored)),
        "killing_s": round(killing_s, 1),
        "exit_codes": codes,
        "identical": _identical(job, plain),
        "left": left,
        "last": asdict(hits[-1]) if hits else None,
    }


def well(found: dict[str, Any]) -> bool:
    """Whether the job ended as if nobody had killed it."""
    ended = found["exit_codes"][-1] == 0 and not found["left"]
    return bool(found["identical"] and ended and found["kills"] > 0)


def _kill_all(
    job: jobs.Job, life: _Life, wanted: int, rng: random.Random, until: float
) -> list[Kill]:
    hits: list[Kill] = []
    start_up_s = 5.0  # until one has been seen
    while len(hits) < wanted and time.monotonic() < until:
        in_start_up, victim = rng.random() < IN_START_UP, rng.choice(VICTIMS)
        share, steps = rng.random(), rng.randint(LEAST_STEPS, MOST_STEPS)
        if in_start_up:
            life.look()
        else:
            began = time.monotonic()
            life.wait_for_steps(steps)
            start_up_s = min(60.0, max(1.0, time.monotonic() - began))
        time.sleep(share * (start_up_s if in_start_up else THEN_S))
        life.look()
        if life.over:
            break
        moment = "training" if life.moved else "start-up"
        if kill(job, life.process.pid, victim):
            life.killed(victim)
            hits.append(Kill(victim, moment, life.attempt, life.step))
            _say(len(hits), wanted, hits[-1])
    return hits


def _say(number: int, wanted: int, hit: Kill) -> None:
    print(
        f"{number}/{wanted}: {hit.victim} of attempt {hit.attempt} in {hit.moment}, "
        f"step {hit.step}",
        file=sys.stderr,
    )


def _summary(hits: list[Kill]) -> dict[str, Any]:
    return {
        "kills": len(hits),
        "kills_of": dict(Counter(hit.victim for hit in hits)),
        "kills_in": dict(Counter(hit.moment for hit in hits)),
    }


def _identical(job: jobs.Job, plain: jobs.Job) -> bool:
    found, wanted = job.folder / "weights.npz", plain.folder / "weights.npz"
    return found.exists() and jobs.identical(found, wanted)
