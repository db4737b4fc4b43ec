"""A device that does not hold one sample is left out, and the same model comes out."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import wide_model

from oomrun.core import events as ev

# 8 MiB of weights, 24 with what Adam keeps.
HEAVY = """
import os
import keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 8))
y = np.sin(x @ random.normal(size=(8, 1)))
model = keras.Sequential([
    keras.Input((8,)),
    keras.layers.Dense(1024, "tanh"),
    keras.layers.Dense(1024, "tanh"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.0001), "mse", metrics=["mae"])
"""
FIT = """
rank = os.environ.get("OOMRUN_RANK", "0")
history = model.fit(
    x, y, batch_size=96, epochs=2, verbose=0, callbacks=callbacks
).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""
RECOVERY = "recovery: {levers: [micro_batch, fewer_devices]}\n"


def plain(job: jobs.Job) -> Path:
    """What plain Keras comes to with the job's script."""
    (folder := job.folder / "plain").mkdir()
    jobs.python(job.folder / "train.py", cwd=folder)
    return folder / "weights-0.npz"


def test_a_device_that_does_not_hold_the_model(tmp_path: Path) -> None:
    more = "strategy: horovod\ndevices: {cpu: 2, memory: [300MiB, 12MiB]}\n" + RECOVERY
    run = jobs.make(tmp_path, f"{HEAVY}callbacks = []{FIT}", more)
    assert run.run() == 0, run.everything()
    _, second = run.events(ev.AttemptStarted)
    assert [device["id"] for device in second.plan["devices"]] == ["cpu:0"]
    # The one that lost it is not taken for the cause, whichever is seen first.
    (ended, _) = run.events(ev.AttemptEnded)
    assert (ended.rank, ended.cause) == (1, "device_oom"), run.everything()
    (decided, _) = run.events(ev.DecisionMade)
    assert decided.left_out == ("cpu:1",)
    assert run.status()["left_out"] == ["cpu:1"]
    assert "without cpu:1 from now on, by the lever fewer_devices" in run.said()
    assert jobs.distance(tmp_path / "weights-0.npz", plain(run)) < 1e-10
    assert jobs.gone(run)


def test_what_the_graph_says_takes_no_memory(tmp_path: Path) -> None:
    """Where all weights once more had no room TensorFlow died of SIGSEGV."""
    more = "devices: cpu\nmemory: {limit: 60MiB}\n"
    run = jobs.make(tmp_path, f"{HEAVY}callbacks = []{FIT}", more)
    assert run.run() == 0, run.everything()
    assert len(run.events(ev.AttemptStarted)) == 1, run.everything()


# From its second epoch on worker 1 has a neighbour that leaves it nothing.
NEIGHBOUR = """
import pathlib
taken, there = [], pathlib.Path("neighbour")
def take():
    taken.append(fill(int(29.5 * 2**20)))
class Neighbour(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if os.environ.get("OOMRUN_RANK") == "1" and (epoch == 1 or there.exists()):
            there.touch()
            take()
callbacks = [Neighbour()]
"""


@pytest.mark.slow
def test_a_device_becomes_too_small(tmp_path: Path) -> None:
    more = (
        "strategy: horovod\ndevices: {cpu: 2, memory: [300MiB, 30MiB]}\n"
        "batch: {micro: {max: 2}}\n"
    )
    run = jobs.make(tmp_path, f"{wide_model.START}{NEIGHBOUR}{FIT}", more + RECOVERY)
    assert run.run() == 0, run.everything()
    decided = run.events(ev.DecisionMade)
    assert decided[-2].left_out == ("cpu:1",), run.everything()
    assert run.status()["left_out"] == ["cpu:1"]
    # What ran out of memory has saved what was trained until then.
    # (TensorFlow may die of SIGSEGV making a constant in a full pool: one more.)
    assert {one.lost_steps for one in run.events(ev.Restored)} == {0}
    assert jobs.distance(tmp_path / "weights-0.npz", plain(run)) < 1e-10
