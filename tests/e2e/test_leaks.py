"""A script that never gives its tensors back is trained to its end all the same."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev
from oomrun.core.state import replay

# Each step keeps some tensors: as a script does that collects its losses, or features.
SCRIPT = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
keras.backend.set_floatx("float64")
rng = np.random.default_rng(0)
x = rng.normal(size=(STEPS * 16, 20))
y = rng.normal(size=(STEPS * 16, 1))
kept = []


class Keeping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        kept.append(tf.fill([MIB, 2**17], 1.0 + len(kept)))


model = keras.Sequential([
    keras.Input((20,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)
])
model.compile(keras.optimizers.Adam(), "mse")
model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Keeping()])
np.savez("weights.npz", *model.get_weights(), *model.optimizer.variables)
"""
# The same of the host. Its limit is a rlimit, and set once TensorFlow has its threads.
ON_HOST = """
import resource
import time


class Keeping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not kept:
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * resource.getpagesize() + 900 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        kept.append(np.ones(4 * 2**17))
        time.sleep(0.01)


model =
"""
LIMIT = "devices: {cpu: 1, memory: [256MiB]}\n"


def script(steps: int, mib: int) -> str:
    """So many steps an epoch, and so many MiB kept of each."""
    return SCRIPT.replace("STEPS", str(steps)).replace("MIB", str(2 * mib))


def test_a_leak_is_seen_before_memory_runs_out(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, script(steps=150, mib=1), LIMIT)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    found = job.events(ev.LeakFound)
    assert found, job.said()
    for leak in found:
        assert 0.9 <= leak.bytes_per_step / 2**20 <= 1.1
        assert leak.grown_bytes < leak.budget_bytes < 256 * 2**20
    status = job.status()
    assert status["restarts"]["leak"] == len(found) == status["attempts"] - 1
    assert status["step"] == 300
    assert job.events(ev.Restored)[-1].lost_steps == 0
    assert "memory leak" in job.said()
    # What a step needs, not what had been kept by then, nor later until the end.
    state = replay(job.events())
    assert max(state.measured.values()) < 20 * 2**20

    plain = tmp_path / "plain"
    plain.mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    weights = "weights.npz"
    assert jobs.distance(tmp_path / weights, plain / weights) <= 1e-10


@pytest.mark.slow
def test_a_leak_that_fills_memory_in_eight_steps_is_seen_too(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, script(steps=9, mib=25), LIMIT)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    status = job.status()
    assert status["restarts"]["leak"] >= 1
    assert status["devices"][0]["micro_batch_size"] == 16
    assert not any(event.lost_steps for event in job.events(ev.Restored))


def test_a_leak_of_the_host_is_seen_too(tmp_path: Path) -> None:
    text = script(steps=200, mib=1)
    begin, end = text.index("class Keeping"), text.index("model =") + len("model =")
    text = text[:begin] + ON_HOST.strip() + text[end:]
    job = jobs.make(tmp_path, text, LIMIT)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    found = job.events(ev.LeakFound)
    assert found, job.said()
    for leak in found:
        assert leak.device == "host"
        assert 3 <= leak.bytes_per_step / 2**20 <= 5
    assert job.status()["step"] == 400
    assert job.events(ev.Restored)[-1].lost_steps == 0
    assert "more are in use of the host" in job.said()
    # A smaller micro-batch would not help.
    assert job.status()["devices"][0]["micro_batch_size"] == 16
