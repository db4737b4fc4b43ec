"""``oomrun.Loop`` with a worker for each device: they train what one would."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import several_workers
import wide_model
from several_workers import BY_HOROVOD, BY_TENSORFLOW, EACH

# A masked loss is divided by what the whole batch has.
SCRIPT = (
    several_workers.START
    + several_workers.PLACES
    + """
import oomrun
w = (random.uniform(size=(250, 1)) < 0.7).astype("float64")
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
        wait()
    loop.values["seen"] += [float(mean.result())]
np.savez(f"weights-{rank}.npz", *model.get_weights(), np.asarray(loop.values["seen"]))
"""
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script comes to by itself."""
    return several_workers.alone(tmp_path_factory.mktemp("plain"), SCRIPT)


@pytest.mark.parametrize(
    "strategy", [BY_TENSORFLOW, pytest.param(BY_HOROVOD, marks=pytest.mark.slow)]
)
def test_one_is_killed(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = (
        f"strategy: {strategy}\ndevices: {{cpu: 2, memory: 300MiB}}\n"
        "checkpoint: {every: 2 steps}\n"
    )
    run = jobs.make(tmp_path, SCRIPT, more)
    several_workers.with_the_second_killed(run, slow="0.5")
    several_workers.trained_as_one(run, plain, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_three_workers_in_passes(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = f"strategy: {strategy}\ndevices: {{cpu: 3, memory: 300MiB}}\n"
    run = jobs.make(tmp_path, SCRIPT, more + "batch: {micro: 20}\n")
    assert run.run() == 0, run.everything()
    several_workers.trained_as_one(run, plain, 3)


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
    several_workers.only_the_second_ran_out(run)
    plain = several_workers.alone(tmp_path / "plain", LARGE)
    several_workers.trained_as_one(run, plain, 2)


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
    # All workers find it; the first that ends takes the others with it.
    logs = "".join(run.run_dir.attempt(1).log(rank).read_text() for rank in (0, 1))
    assert "keep what it counts in a keras.metrics object" in logs
