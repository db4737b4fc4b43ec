"""``oomrun.Loop`` with a worker for each device: they train what one would."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jobs
import pytest
import wide_model

from oomrun.core import events as ev

BY_HOROVOD = "horovod"
BY_TENSORFLOW = "multi_worker_mirrored"
EACH = [BY_HOROVOD, BY_TENSORFLOW]

# 250 samples: 96, 96 and 58. A masked loss is divided by what the whole batch has.
SCRIPT = """
import os, time
import keras, numpy as np, tensorflow as tf
import oomrun
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 24))
y = np.sin(x @ random.normal(size=(24, 1)))
w = (random.uniform(size=(250, 1)) < 0.7).astype("float64")
class Places(keras.layers.Layer):  # the gradient of its table is sparse
    def build(self, shape):
        self.table = self.add_weight(shape=(30, 1))
    def call(self, x):
        return x + tf.gather(self.table, tf.range(24))[:, 0]
model = keras.Sequential([
    keras.Input((24,)), Places(), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1),
])
error = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
mean = keras.metrics.MeanAbsoluteError()
def loss(batch):
    x, y, w = batch
    found = model(x, training=True)
    mean.update_state(y, found)
    return error(y, found, sample_weight=w)
data = tf.data.Dataset.from_tensor_slices((x, y, w)).shuffle(250, seed=5).batch(96)
loop = oomrun.Loop(loss, keras.optimizers.Adam(0.01), state=[model, mean])
loop.values["seen"] = []
for epoch in loop.epochs(3):
    mean.reset_state()
    for batch in loop.batches(data):
        value = loop.step(batch)
        loop.values["seen"] += [float(value)]
        time.sleep(float(os.environ.get("SLOW", "0")))
    loop.values["seen"] += [float(mean.result())]
rank = os.environ.get("OOMRUN_RANK", "0")
np.savez(f"weights-{rank}.npz", *model.get_weights(), np.asarray(loop.values["seen"]))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script comes to by itself."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(SCRIPT)
    jobs.python(folder / "train.py", cwd=folder)
    return folder / "weights-0.npz"


def trained_as_one(run: jobs.Job, plain: Path, workers: int) -> None:
    weights = [run.folder / f"weights-{rank}.npz" for rank in range(workers)]
    for other in weights[1:]:
        assert jobs.identical(weights[0], other)
    assert jobs.distance(weights[0], plain) < 1e-10, run.everything()


@pytest.mark.parametrize(
    "strategy", [BY_TENSORFLOW, pytest.param(BY_HOROVOD, marks=pytest.mark.slow)]
)
def test_one_is_killed(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = (
        f"strategy: {strategy}\ndevices: {{cpu: 2, memory: 300MiB}}\n"
        "checkpoint: {every: 2 steps}\n"
    )
    run = jobs.make(tmp_path, SCRIPT, more)
    process = run.start(env={"SLOW": "0.5"})
    try:
        run.wait_for(ev.CheckpointSaved)
        _, second = run.events(ev.AttemptStarted)[0].pids
        os.kill(second, signal.SIGKILL)
        assert process.wait(240) == 0, run.everything()
    finally:
        process.kill()
        process.wait()
    assert len(run.events(ev.AttemptStarted)) == 2
    trained_as_one(run, plain, 2)
    assert jobs.gone(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_three_workers_in_passes(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = f"strategy: {strategy}\ndevices: {{cpu: 3, memory: 300MiB}}\n"
    run = jobs.make(tmp_path, SCRIPT, more + "batch: {micro: 20}\n")
    assert run.run() == 0, run.everything()
    trained_as_one(run, plain, 3)


# In the second epoch a neighbour of worker 1 takes all but 12 MiB of its memory.
LARGE = (
    wide_model.START
    + """\
import oomrun
def loss(batch):
    x, y = batch
    return tf.square(model(x, training=True) - y)
optimizer = keras.optimizers.Adam(0.0001)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(96)
rank = os.environ.get("OOMRUN_RANK", "0")
loop = oomrun.Loop(loss, optimizer, state=[model])
for epoch in loop.epochs(2):
    if epoch == 1 and rank == "1":
        taken = fill(18 * 2**20)
    for batch in loop.batches(data):
        loop.step(batch)
np.savez(f"weights-{rank}.npz", *model.get_weights())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_the_one_that_runs_out_of_memory_makes_smaller_passes(
    tmp_path: Path, strategy: str
) -> None:
    more = f"strategy: {strategy}\ndevices: {{cpu: 2, memory: [600MiB, 30MiB]}}\n"
    run = jobs.make(tmp_path, LARGE, more)
    assert run.run() == 0, run.everything()
    ooms = {(o.rank, o.device, o.recovery) for o in run.events(ev.OomOccurred)}
    assert ooms == {(1, "cpu:1", "in_process")}
    assert len(run.events(ev.AttemptStarted)) == 1
    passes: dict[str, list[tuple[int, int]]] = {"cpu:0": [], "cpu:1": []}
    for planned in run.events(ev.SharePlanned):
        passes[planned.device].append((planned.share, planned.micro_batch_size))
    ((first, _),) = passes["cpu:0"]
    (second, at_first), *_, (after, at_last) = passes["cpu:1"]
    assert first + second == 96
    assert after == second
    assert at_last <= at_first // 2
    (plain := tmp_path / "plain").mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    trained_as_one(run, plain / "weights-0.npz", 2)


COUNTS = SCRIPT.replace("def loss(", "count = tf.Variable(0.0)\ndef loss(").replace(
    "    x, y, w = batch\n",
    "    x, y, w = batch\n    count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))\n",
)


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    script = COUNTS.replace("state=[model, mean]", "state=[model, mean, count]")
    more = "strategy: multi_worker_mirrored\ndevices: {cpu: 2, memory: 300MiB}\n"
    run = jobs.make(tmp_path, script, more)
    assert run.run() == 1, run.everything()
    assert "keep what it counts in a keras.metrics object" in run.log(1)
