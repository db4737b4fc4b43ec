"""From memory that ran out to the next good step: in process, and by a restart.

    PYTHONPATH=tests:tests/e2e python -m benchmarks.recovery

Real runs of the command under a CPU device's limit, measured by their journals. Time
counts from the moment at which the worker knows of it: before that TensorFlow's CPU
allocator waits 10 s for memory to come back, which a GPU's does too and oomrun cannot
change. A restart is compared with a plain cold start of the same script, from
``python train.py`` to the end of its first step. In process memory runs out twice: the
first time batches had been trained whole, so the next step is traced anew for parts of
a batch; the second time they had been trained in parts (``traced_s`` is what the step
took more than a later one). Byte-code is kept, ours too, as it is of what is installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs

from oomrun.core import events as ev

_SCRIPT = """\
import os, sys, time
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(5120, 16, 16, 1)).astype("float32")
y = np.zeros(5120, "int32")

hogs = dict(zip((3, 11), map(int, sys.argv[1:])))  # MiB, by step

class Seen(keras.callbacks.Callback):
    hog = []
    def on_train_batch_begin(self, batch, logs=None):
        # As another user of the device would, and in small pieces: a large one may be
        # given nearly twice what it asks for.
        self.hog += [tf.fill([2**16], 0.5) for _ in range(4 * hogs.pop(batch, 0))]
    def on_train_batch_end(self, batch, logs=None):
        with open("steps", "a") as file:
            file.write(f"{time.time()}\\n")

model = keras.Sequential([
    keras.Input((16, 16, 1)), keras.layers.UpSampling2D(4),
    keras.layers.Conv2D(8, 3, activation="tanh", padding="same"),
    keras.layers.Conv2D(8, 1, activation="tanh"),
    keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy")
model.fit(x, y, batch_size=256, epochs=1, verbose=0, callbacks=[Seen()])
"""
_LIMITED = "devices: {cpu: 1, memory: 240MiB}\nmemory: {probe: never}\n"
_HOGS_MIB = (115, 80)


def run(folder: Path, hogs: Sequence[int], more: str) -> list[dict[str, Any]]:
    """One run; for each step in which memory ran out, from the last time it did."""
    arguments = f"args: [{', '.join(map(str, hogs))}]\n"
    job = jobs.make(folder, _SCRIPT, _LIMITED + arguments + more)
    assert job.run() == 0, job.everything()
    moments = [float(line) for line in (folder / "steps").read_text().split()]
    lost = sum(event.lost_steps for event in job.events(ev.Restored))
    ooms = {event.step: event for event in job.events(ev.OomOccurred)}
    ends = [*[oom.at for oom in list(ooms.values())[1:]], math.inf]
    found = []
    for oom, end in zip(ooms.values(), ends, strict=True):
        after = [moment for moment in moments if oom.at < moment < end]
        # The next that runs out is among them if it comes at once: 10 s, no median.
        steps = [b - a for a, b in itertools.pairwise(after[1:])]
        step_s = sorted(steps)[len(steps) // 2]
        found.append(
            {
                "to_next_step_s": round(after[0] - oom.at, 3),
                "limit_s": round(2 * step_s + 0.1, 3),
                "step_s": round(step_s, 3),
                "traced_s": round(after[0] - oom.at - step_s, 3),
                "lost_steps": lost,
            }
        )
    return found


def cold_start(folder: Path) -> float:
    """Seconds from ``python train.py`` to the end of its first step."""
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    began = time.time()
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder, check=True, env=jobs.environment({"CUDA_VISIBLE_DEVICES": "-1"}),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return float((folder / "steps").read_text().split()[0]) - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "byte-code")
        cold_start(folder / "warm-up")
        plain_s = cold_start(folder / "plain")
        whole, parts = run(folder / "inside", _HOGS_MIB, "")
        never = "recovery: {in_process: never}\n"
        (restarted,) = run(folder / "again", _HOGS_MIB[:1], never)
    restarted["limit_s"] = round(plain_s + 1, 3)
    found = {
        "in_process_first": whole,
        "in_process_later": parts,
        "by_restart": restarted,
        "plain_cold_start_s": round(plain_s, 3),
        "waited_by_tensorflow_s": 10,
        "passed": all(
            row["to_next_step_s"] <= row["limit_s"] and not row["lost_steps"]
            for row in (whole, parts, restarted)
        ),
    }
    print(json.dumps(found, indent=2))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
