"""Strategies with a worker for each device: several workers train what one would."""

from __future__ import annotations

import signal
from pathlib import Path

import jobs
import pytest
import several_workers
import wide_model
from several_workers import BY_HOROVOD, BY_TENSORFLOW, EACH

from oomrun.core import events as ev

SCRIPT = (
    several_workers.START
    + several_workers.PLACES
    + """
model = keras.Sequential([
    keras.Input((24,)),
    Places(),
    keras.layers.Dense(64, "tanh", kernel_regularizer="l2"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(
    x, y, batch_size=96, epochs=int(sys.argv[1]), verbose=0, callbacks=[slow]
).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""
)


def job(folder: Path, strategy: str, more: str) -> jobs.Job:
    return jobs.make(folder, SCRIPT, f'args: ["3"]\nstrategy: {strategy}\n' + more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plain Keras comes to."""
    return several_workers.alone(tmp_path_factory.mktemp("plain"), SCRIPT, "3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_two_workers_train_as_one(tmp_path: Path, plain: Path, strategy: str) -> None:
    run = job(tmp_path, strategy, "devices: {cpu: 2, memory: 300MiB}\n")
    assert run.run() == 0, run.everything()
    several_workers.trained_as_one(run, plain, 2)
    shares = run.events(ev.SharePlanned)
    assert {(s.device, s.share) for s in shares} == {("cpu:0", 48), ("cpu:1", 48)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_three_workers_in_passes(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = "devices: {cpu: 3, memory: [600MiB, 200MiB, 200MiB]}\nbatch: {micro: 20}\n"
    run = job(tmp_path, strategy, more)
    assert run.run() == 0, run.everything()
    several_workers.trained_as_one(run, plain, 3)


# Horovod's is quick in test_pods, where a whole pod is killed.
@pytest.mark.parametrize(
    "strategy", [BY_TENSORFLOW, pytest.param(BY_HOROVOD, marks=pytest.mark.slow)]
)
def test_one_is_killed(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = "devices: {cpu: 2, memory: 300MiB}\ncheckpoint: {every: 2 steps}\n"
    run = job(tmp_path, strategy, more)
    ended = several_workers.with_the_second_killed(run, slow="1")
    assert ended.summary == "worker 1: the worker was killed from outside (SIGKILL)"
    several_workers.trained_as_one(run, plain, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EACH)
def test_one_hangs(tmp_path: Path, plain: Path, strategy: str) -> None:
    more = (
        "devices: {cpu: 2, memory: 300MiB}\n"
        "checkpoint: {every: 2 steps}\nrecovery: {hang_after: 60s}\n"
    )
    run = job(tmp_path, strategy, more)
    several_workers.with_a_signal_to_the_second(run, signal.SIGSTOP, slow="1")
    first = run.events(ev.AttemptEnded)[0]
    assert first.cause == "hang"
    # The one that is stopped cannot say where it is; who waits for it can.
    assert "most recent call first" in run.log(1)
    several_workers.trained_as_one(run, plain, 2)
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
    first, second = several_workers.only_the_second_ran_out(run)
    # Before that, each took its whole share at once, and who has less got less.
    assert all(share == size for share, size in (first, second))
    assert second[0] < 48 < first[0]
    plain = several_workers.alone(tmp_path / "plain", LARGE)
    several_workers.trained_as_one(run, plain, 2)


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
