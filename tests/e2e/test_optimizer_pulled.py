"""Levers for the optimizer: a job whose Adam does not fit finishes with another one.

Memory runs out in TensorFlow's own allocator, under the hard limit of a CPU device.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import jobs
import numpy as np
import pytest

from oomrun.core import events as ev

# 18 MiB of weights, as much of gradients, and twice as much of Adam's slots.
WIDE = """\
import json
import sys

import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 768)).astype("float32")
y = x[:, :4] * 0.5
model = keras.Sequential([
    keras.Input((768,)),
    *(keras.layers.Dense(768, activation="tanh") for _ in range(8)),
    keras.layers.Dense(4),
])
kind = keras.optimizers.SGD if "sgd" in sys.argv else keras.optimizers.Adam
rate = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.9)
optimizer = kind(rate, weight_decay=1e-3, global_clipnorm=1.0)
model.compile(optimizer, "mse")
history = model.fit(x, y, batch_size=16, epochs=4, verbose=2, shuffle=False)
np.savez("weights.npz", *model.get_weights())
with open("seen.json", "w") as file:
    json.dump([type(model.optimizer).__name__, int(optimizer.iterations)], file)
"""
JOB = """\
devices: {{cpu: 1, memory: 70MiB}}
memory: {{probe: never}}
recovery: {{levers: [micro_batch, {lever}], in_process: never}}
checkpoint: {{every: 2 steps}}
"""


def plain(folder: Path, script: str) -> None:
    """The same script with SGD, by plain Keras, without any limit."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    subprocess.run(
        [sys.executable, "train.py", "sgd"],
        cwd=folder,
        env=jobs.environment(),
        check=True,
        capture_output=True,
    )


def weights(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "weights.npz") as found:
        return [found[name] for name in found.files]


def test_adam_does_not_fit_and_sgd_does(tmp_path: Path) -> None:
    job = jobs.make(tmp_path / "job", WIDE, JOB.format(lever="optimizer_sgd"))
    assert job.run() == 0, job.everything()
    assert (job.folder / "seen.json").read_text() == '["SGD", 16]'
    restarts = [d for d in job.events(ev.DecisionMade) if d.action == "restart"]
    # At once: weights, gradients and slots alone are more than the limit.
    assert [d.levers for d in restarts] == [("optimizer_sgd",)]
    (told,) = job.events(ev.OptimizerReplaced)
    count = sum(value.size for value in weights(job.folder))
    assert (told.written, told.used) == ("Adam", "SGD")
    assert (told.written_bytes, told.used_bytes) == (8 * count, 0)
    found = job.status()
    assert found["levers"] == ["optimizer_sgd"]
    assert found["optimizer"]["written_bytes"] == 8 * count
    report = (job.run_dir.path / found["oom_report"]).read_text()
    assert "lever optimizer_sgd (models are compiled with SGD" in report


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_it(tmp_path: Path) -> None:
    script = WIDE.replace("epochs=4", "epochs=40")
    job = jobs.make(tmp_path / "job", script, JOB.format(lever="optimizer_sgd"))
    process = job.start()
    job.wait_for(ev.CheckpointSaved, lambda saved: saved.step >= 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, job.everything()
    assert job.run() == 0, job.everything()
    assert (job.folder / "seen.json").read_text() == '["SGD", 160]'
    told = job.events(ev.OptimizerReplaced)
    assert [found.attempt for found in told] == [2, 3]
    restored = job.events(ev.Restored)
    assert restored[-1].step >= 10
    # What it has gathered itself is not left behind.
    left = [n for n in job.events(ev.Noted) if n.code == "optimizer-slots"]
    assert [note.attempt for note in left] == [2]
    # It ran out before a step was done, so this is the training of SGD from the start.
    plain(tmp_path / "plain", script)
    for one, other in zip(
        weights(job.folder), weights(tmp_path / "plain"), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
