"""Strategies with a worker for each device: several workers train what one would."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jobs
import pytest
import wide_model

from oomrun.core import events as ev

# 250 samples: 96, 96 and 58, which is no multiple of anything.
SCRIPT = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 24))
y = np.sin(x @ random.normal(size=(24, 1)))
class Places(keras.layers.Layer):  # the gradient of its table is sparse
    def build(self, shape):
        self.table = self.add_weight(shape=(30, 1))
    def call(self, x):
        return x + tf.gather(self.table, tf.range(24))[:, 0]
model = keras.Sequential([
    keras.Input((24,)),
    Places(),
    keras.layers.Dense(64, "tanh", kernel_regularizer="l2"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("SLOW", "0")))
history = model.fit(
    x, y, batch_size=96, epochs=int(sys.argv[1]), verbose=0, callbacks=[Slow()]
).history
rank = os.environ.get("OOMRUN_RANK", "0")
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""


BY_HOROVOD = "horovod"
BY_TENSORFLOW = "multi_worker_mirrored"
EACH = [BY_HOROVOD, BY_TENSORFLOW]


def job(folder: Path, strategy: str, more: str) -> jobs.Job:
    return jobs.make(folder, SCRIPT, f'args: ["3"]\nstrategy: {strategy}\n' + more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plain Keras comes to."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(SCRIPT)
    jobs.python(folder / "train.py", "3", cwd=folder)
    return folder / "weights-0.npz"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_two_workers_train_as_one(tmp_path: Path, plain: Path, strategy: str) -> None:
    run = job(tmp_path, strategy, "devices: {cpu: 2, memory: 300MiB}\n")
    assert run.run() == 0, run.everything()
    weights = [tmp_path / f"weights-{rank}.npz" for rank in range(2)]
    assert jobs.identical(*weights)
    assert jobs.distance(weights[0], plain) < 1e-10, run.everything()
    shares = run.events(ev.SharePlanned)
    assert {(s.device, s.share) for s in shares} == {("cpu:0", 48), ("cpu:1", 48)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_three_workers_in_passes(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = "devices: {cpu: 3, memory: [600MiB, 200MiB, 200MiB]}\nbatch: {micro: 20}\n"
    run = job(tmp_path, strategy, more)
    assert run.run() == 0, run.everything()
    weights = [tmp_path / f"weights-{rank}.npz" for rank in range(3)]
    assert jobs.identical(weights[0], weights[1])
    assert jobs.identical(weights[0], weights[2])
    assert jobs.distance(weights[0], plain) < 1e-10, run.everything()


@pytest.mark.parametrize("strategy", EACH)
def test_one_is_killed(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = "devices: {cpu: 2, memory: 300MiB}\ncheckpoint: {every: 2 steps}\n"
    run = job(tmp_path, strategy, more)
    process = run.start(env={"SLOW": "1"})
    try:
        run.wait_for(ev.CheckpointSaved)
        _, second = run.events(ev.AttemptStarted)[0].pids
        os.kill(second, signal.SIGKILL)
        assert process.wait(240) == 0, run.everything()
    finally:
        process.kill()
        process.wait()
    (ended, _) = run.events(ev.AttemptEnded)
    assert ended.summary == "worker 1: the worker was killed from outside (SIGKILL)"
    assert jobs.distance(tmp_path / "weights-0.npz", plain) < 1e-10, run.everything()
    assert jobs.identical(*(tmp_path / f"weights-{rank}.npz" for rank in range(2)))
    assert jobs.gone(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_one_hangs(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = (
        "devices: {cpu: 2, memory: 300MiB}\n"
        "checkpoint: {every: 2 steps}\nrecovery: {hang_after: 60s}\n"
    )
    run = job(tmp_path, strategy, more)
    process = run.start(env={"SLOW": "1"})
    try:
        run.wait_for(ev.CheckpointSaved)
        _, second = run.events(ev.AttemptStarted)[0].pids
        os.kill(second, signal.SIGSTOP)
        assert process.wait(400) == 0, run.everything()
    finally:
        process.kill()
        process.wait()
    first = run.events(ev.AttemptEnded)[0]
    assert first.cause == "hang"
    # The one that is stopped cannot say where it is; who waits for it can.
    assert "most recent call first" in run.log(1)
    assert jobs.distance(tmp_path / "weights-0.npz", plain) < 1e-10, run.everything()
    assert jobs.gone(run)


# In the second epoch a neighbour of worker 1 takes all but 12 MiB of its memory.
LARGE = (
    wide_model.START
    + """\
rank = os.environ.get("OOMRUN_RANK", "0")
class Neighbour(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and rank == "1":
            self.taken = fill(18 * 2**20)
history = model.fit(
    x, y, batch_size=96, epochs=2, verbose=0, callbacks=[Neighbour()]
).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""
)


@pytest.mark.parametrize(
    "strategy", [BY_HOROVOD, pytest.param(BY_TENSORFLOW, marks=pytest.mark.slow)]
)
def test_each_takes_what_fits_and_goes_on_where_less_does(
    tmp_path: Path, strategy: str
) -> None:
    more = f"strategy: {strategy}\ndevices: {{cpu: 2, memory: [600MiB, 30MiB]}}\n"
    run = jobs.make(tmp_path, LARGE, more)
    assert run.run() == 0, run.everything()
    # How many depends on how the pieces lie.
    ooms = {(o.rank, o.device, o.recovery) for o in run.events(ev.OomOccurred)}
    assert ooms == {(1, "cpu:1", "in_process")}
    assert len(run.events(ev.AttemptStarted)) == 1
    of: dict[str, list[tuple[int, int]]] = {"cpu:0": [], "cpu:1": []}
    for planned in run.events(ev.SharePlanned):
        of[planned.device].append((planned.share, planned.micro_batch_size))
    ((first, first_pass),) = of["cpu:0"]
    (second, second_pass), *_, (after, pass_after) = of["cpu:1"]
    assert first + second == 96
    assert (first_pass, second_pass) == (first, second)
    assert second < 48 < first
    # Only the device that had less got other passes, and kept its share.
    assert after == second
    assert pass_after <= second // 2
    (plain := tmp_path / "plain").mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    weights = [tmp_path / f"weights-{rank}.npz" for rank in range(2)]
    assert jobs.identical(*weights)
    assert jobs.distance(weights[0], plain / "weights-0.npz") < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_it_is_stopped_and_goes_on(tmp_path: Path, plain: Path, strategy: str) -> None:
    run = job(tmp_path, strategy, "devices: {cpu: 2, memory: 300MiB}\n")
    process = run.start(env={"SLOW": "1"})
    try:
        run.wait_for(ev.Progressed)
        process.terminate()
        assert process.wait(120) == 75, run.everything()
    finally:
        process.kill()
        process.wait()
    (ended,) = run.events(ev.AttemptEnded)
    assert ended.summary == "worker 0: stopped on request, with a checkpoint"
    assert run.run() == 0, run.everything()
    assert jobs.distance(tmp_path / "weights-0.npz", plain) < 1e-10, run.everything()
