"""The fault matrix: its cells, those that `make test` draws, and what they train.

Covers: the names, the draw by a seed, a training whose right weights are known without
TensorFlow. Does not cover: the faults (``test_fault_*``), what users are told of them
(``docs/fault-matrix.md``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import jobs
import numpy as np
import pytest

_FILES = ("MANIFEST.json", "arrays.bin", "state.json")
_DAMAGES = ("cut", "flipped", "deleted")
DAMAGED = {
    f"damaged-{damage}-{file}": (damage, file) for damage in _DAMAGES for file in _FILES
}
CELLS = (
    *(
        f"oom-{where}-{moment}"
        for where in ("forward", "backward", "apply")
        for moment in ("first", "middle", "last")
    ),
    "oom-validation-middle", "oom-validation-last", "oom-checkpoint",
    "host-oom-limit", "host-oom-kernel",
    "crash-once", "crash-always", "crash-third",
    "disk-full-checkpoint", "disk-full-checkpoint-limit", "disk-full-journal",
    "disk-full-log", "disk-full-log-from-the-start",
    "read-only-from-the-start", "read-only-midway", "read-only-and-killed",
    *DAMAGED,
    "stopped-with-time", "stopped-without-time", "hang",
    "clock-forward", "clock-back", "clock-far-back",
    "port-in-use-next", "port-in-use-error", "two-supervisors",
)  # fmt: skip
#: The environment variable that sets the draw; equal for all processes of a test run.
SEED = "OOMRUN_MATRIX_SEED"
_DRAWN = 3
# Never drawn: too long for `make test`.
_LONG = frozenset({"hang"})


def seed() -> int:
    """Of the cells that `make test` runs."""
    return int(os.environ.get(SEED, "7"))


def drawn() -> frozenset[str]:
    """The cells that are not of `make chaos` alone."""
    short = [cell for cell in CELLS if cell not in _LONG]
    return frozenset(random.Random(seed()).sample(short, _DRAWN))


def cells(names: Sequence[str]) -> list[Any]:
    """These cells as parameters of a test, marked slow but for those drawn."""
    unknown = set(names) - set(CELLS)
    assert not unknown, unknown
    now = drawn()
    return [
        pytest.param(name, id=name, marks=() if name in now else pytest.mark.slow)
        for name in names
    ]


def beginning(*starts: str) -> list[Any]:
    """All cells whose names begin so."""
    return cells([name for name in CELLS if name.startswith(starts)])


# 18 steps of 16 samples. What is at FAULT is done before a step where the environment
# variable of that name is set. MADE counts the processes.
_SCRIPT = """\
import os, signal, sys, time
import keras
import numpy as np

keras.backend.set_floatx("float64")
MADE = len([name for name in os.listdir(".") if name.startswith("start-")])
open(f"start-{MADE}", "w").close()

def first_time(name):
    if os.path.exists(name):
        return False
    open(name, "w").close()
    return True

def fault(step):
    FAULT

class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if os.environ.get("FAULT"):
            fault(int(model.optimizer.iterations.numpy()))

rng = np.random.default_rng(0)
x, y = rng.normal(size=(96, 16)), rng.normal(size=(96, 1))
layer = keras.layers.Dense(1, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((16,)), layer])
model.compile(keras.optimizers.SGD(0.0625, momentum=0.875), "mse")
model.fit(
    x, y, batch_size=16, epochs=3, shuffle=False, verbose=2, callbacks=[Fault()]
)
print("the end of the script")
np.savez("weights.npz", *model.get_weights())
"""
STEPS = 18
JOB = "devices: cpu\ncheckpoint: {every: 2 steps}\n"


def script(fault: str) -> str:
    """The training, with Python of this function's body in place of a fault."""
    lines = fault.strip("\n").splitlines()
    return _SCRIPT.replace("FAULT\n", "\n    ".join(lines) + "\n", 1)


def is_right(job: jobs.Job) -> bool:
    """Whether the weights are those of the 18 steps, which NumPy takes here too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 16)), rng.normal(size=(96, 1))
    x = np.hstack([x, np.ones((96, 1))])  # the bias is one more weight
    weights, speed = np.zeros((17, 1)), np.zeros((17, 1))
    for step in range(STEPS):
        rows = slice(16 * (step % 6), 16 * (step % 6) + 16)
        gradient = 2 / 16 * x[rows].T @ (x[rows] @ weights - y[rows])
        # Numbers that float32 has exactly, which Keras takes them through.
        speed = 0.875 * speed - 0.0625 * gradient
        weights = weights + speed
    kernel, bias = jobs.arrays(job.folder / "weights.npz")
    found = np.vstack([kernel, bias[None]])
    distance = float(np.abs(found - weights).max() / np.linalg.norm(weights))
    return distance <= 1e-12


def check_complete(job: jobs.Job) -> None:
    """The run has ended well, with the right weights, and nothing is left of it."""
    status = job.status()
    assert (status["state"], status["step"]) == ("completed", STEPS), job.everything()
    assert is_right(job)
    assert jobs.gone(job)
