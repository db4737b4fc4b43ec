"""Custom loops through the real command: out of memory, killed, stopped, and plain."""

from __future__ import annotations

import signal
from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

EXAMPLE = Path(__file__).parents[2] / "configs" / "custom-loop"


def example(tmp_path: Path, epochs: int, *options: str) -> tuple[jobs.Job, Path, Path]:
    """The example as it is, only shorter, by itself and under oomrun."""
    alone, under = tmp_path / "alone.npz", tmp_path / "under.npz"
    env = {"FLOATX": "float64"}
    script = EXAMPLE / "train.py"
    jobs.python(
        script, "--epochs", str(epochs), "--output", str(alone), cwd=tmp_path, env=env
    )
    folder = tmp_path / "run"
    folder.mkdir()
    job = jobs.Job(folder)
    (folder / "job.yaml").symlink_to(EXAMPLE / "job.yaml")
    code = job.run(
        "--set", f"script={script}",
        "--set", f"args=[--epochs, {epochs}, --output, {under}]",
        "--set", "metrics.listen=127.0.0.1:0", "--run-dir", f"runs/{jobs.NAME}",
        *options, env=env,
    )  # fmt: skip
    assert code == 0, job.everything()
    return job, under, alone


@pytest.mark.slow
def test_the_example_ends_with_the_weights_of_the_script_alone(tmp_path: Path) -> None:
    job, under, alone = example(tmp_path, 2)
    status = job.status()
    assert status["state"] == "completed"
    assert status["oom_events"] == 0
    assert 1 <= len(job.events(ev.Probed)) <= 3
    assert (status["attempts"], status["restarts"]["oom"]) == (1, 0)
    assert status["global_batch_size"] == 256
    assert status["devices"][0]["micro_batch_size"] < 256
    assert (status["epoch"], status["step"], status["samples"]) == (2, 12, 2 * 1536)
    assert not job.events(ev.Noted)
    assert jobs.distance(under, alone) <= 1e-10
    assert jobs.gone(job)


@pytest.mark.slow
def test_without_recovery_in_process_a_loop_restarts_and_loses_no_step(
    tmp_path: Path,
) -> None:
    options = ("--set", "recovery.in_process=never", "--set", "memory.probe=never")
    job, under, alone = example(tmp_path, 1, *options)
    ooms = job.events(ev.OomOccurred)
    assert {o.recovery for o in ooms} == {"restart"}
    saved = [c for c in job.events(ev.CheckpointSaved) if c.reason == "out of memory"]
    assert [c.step for c in saved] == [o.step for o in ooms]
    assert [r.lost_steps for r in job.events(ev.Restored)] == [0] * len(ooms)
    status = job.status()
    assert status["restarts"]["oom"] == len(ooms) >= 1
    assert (status["step"], status["samples"]) == (6, 1536)
    assert jobs.distance(under, alone) <= 1e-10


STEPS = """\
import os
import signal
import keras
import numpy as np
import tensorflow as tf
import oomrun

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(5)
EPOCHS, ROWS, BATCH = 60, 50, 8
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6))
x[:, 0] = np.arange(ROWS)
data = tf.data.Dataset.from_tensor_slices((x, x[:, 1:].sum(1)))
data = data.shuffle(ROWS, seed=1).batch(BATCH)

class Net(keras.Model):
    '''Without variables until it is called.'''

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(32, "tanh")
        self.drop, self.out = keras.layers.Dropout(0.2), keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.drop(self.inner(x / 10), training=training))[:, 0]

model, error = Net(), keras.metrics.MeanSquaredError()
seen = tf.Variable(tf.zeros([ROWS], tf.int32), trainable=False)

def loss(batch):
    x, y = batch
    predictions = model(x, training=True)
    error.update_state(y, predictions)
    rows = tf.cast(x[:, :1], tf.int32)
    seen.assign(tf.tensor_scatter_nd_add(seen, rows, tf.ones_like(rows[:, 0])))
    return tf.square(predictions - y)

loop = oomrun.Loop(loss, keras.optimizers.Adam(0.01), state=[model, error, seen])
loop.values.update(errors=[], drawn=[])
for epoch in loop.epochs(EPOCHS):
    error.reset_state()
    for index, batch in enumerate(loop.batches(data)):
        loop.step(batch)
        loop.values["drawn"] += [float(np.random.random())]
        at_the_end = epoch == EPOCHS - 2 and index == 3
        if os.environ.get("KILL") == "1" and at_the_end and not os.path.exists("dead"):
            open("dead", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    # Every sample once in every epoch, whatever happened in between.
    assert (seen.numpy() == epoch + 1).all(), (epoch, seen.numpy())
    loop.values["errors"] += [float(error.result())]

# Another training after it, which a restart of the first one leaves alone.
model.compile("sgd", "mse")
model.fit(x, x[:, 2], batch_size=8, epochs=2, verbose=2)
values = [np.array(v) for _, v in sorted(loop.values.items())]
np.savez("weights.npz", *model.get_weights(), seen.numpy(), *values)
"""
JOB = "devices: {cpu: 1, memory: 240MiB}\ncheckpoint: {every: 5 steps}\n"


def test_a_loop_that_is_stopped_and_killed_is_the_one_that_was_not(
    tmp_path: Path,
) -> None:
    whole = jobs.make(tmp_path / "whole", STEPS, JOB)
    assert whole.run() == 0, whole.everything()
    job = jobs.make(tmp_path / "job", STEPS, JOB)
    process = job.start(env={"KILL": "1"})
    job.wait_for(ev.Progressed)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, job.everything()
    stopped = [c for c in job.events(ev.CheckpointSaved) if c.reason == "stop"]
    assert len(stopped) == 1, job.everything()
    assert job.run(env={"KILL": "1"}) == 0, job.everything()
    first, second = job.events(ev.Restored)
    assert (first.name, first.lost_steps) == (stopped[0].name, 0)
    # Killed after step 410, in the middle of an epoch of seven: the checkpoint of step
    # 405 was complete by then, or being written.
    assert second.step in (400, 405)
    status = job.status()
    assert status["restarts"] == {
        "oom": 0,
        "crash": 1,
        "preemption": 1,
        "hang": 0,
        "leak": 0,
    }
    assert [(e.fit, e.step) for e in job.events(ev.FitEnded)] == [(1, 420), (2, 434)]
    assert not job.events(ev.Noted)
    found, wanted = job.folder / "weights.npz", whole.folder / "weights.npz"
    assert jobs.identical(found, wanted)
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    assert jobs.distance(found, tmp_path / "weights.npz") <= 1e-10
    assert jobs.gone(job)
