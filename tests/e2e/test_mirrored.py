"""Strategy mirrored: several devices in one worker train what one would."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import several_workers
import wide_model

from oomrun.core import events as ev

SCRIPT = (
    several_workers.START
    + """
model = keras.Sequential([
    keras.Input((24,)),
    keras.layers.Dense(64, "tanh", kernel_regularizer="l2"),
    keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(
    x, y, batch_size=96, epochs=int(sys.argv[1]), verbose=0,
    validation_data=(x[:50], y[:50]),
).history
values = [np.asarray(history[name]) for name in sorted(history)]
values += [model.predict(x, batch_size=70, verbose=0)]
values += model.evaluate(x, y, batch_size=70, verbose=0)
np.savez("weights.npz", *model.get_weights(), *model.optimizer.variables, *values)
"""
)


def job(folder: Path, more: str, epochs: int = 3) -> jobs.Job:
    return jobs.make(folder, SCRIPT, f'args: ["{epochs}"]\n' + more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plain Keras comes to."""
    folder = tmp_path_factory.mktemp("plain")
    return several_workers.alone(folder, SCRIPT, "3", name="weights.npz")


@pytest.mark.slow
def test_three_devices_in_passes(tmp_path: Path, plain: Path) -> None:
    more = (
        "strategy: mirrored\ndevices: {cpu: 3, memory: [600MiB, 200MiB, 200MiB]}\n"
        "batch: {micro: 20}\n"
    )
    run = job(tmp_path, more)
    assert run.run() == 0, run.everything()
    assert jobs.distance(tmp_path / "weights.npz", plain) < 1e-10, run.everything()
    for device in ("cpu:0", "cpu:1", "cpu:2"):
        assert several_workers.shares(run, device) == [(32, 16)]


# In the second epoch a neighbour takes all but 40 MiB of what the two devices have
# together.
LARGE = (
    wide_model.START
    + """\
class Neighbour(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and "OOMRUN_RANK" in os.environ:
            self.taken = fill((200 - 40) * 2**20)
history = model.fit(
    x, y, batch_size=96, epochs=2, verbose=0, callbacks=[Neighbour()]
).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez("weights.npz", *model.get_weights(), *values)
"""
)


def test_the_device_that_runs_out_of_memory_makes_smaller_passes(
    tmp_path: Path,
) -> None:
    more = "strategy: mirrored\ndevices: {cpu: 2, memory: 100MiB}\n"
    run = jobs.make(tmp_path, LARGE, more)
    assert run.run() == 0, run.everything()
    assert len(run.events(ev.AttemptStarted)) == 1
    ooms = run.events(ev.OomOccurred)
    assert ooms, run.everything()
    assert {oom.recovery for oom in ooms} == {"in_process"}
    # Which one asks for too much is the race's; it alone makes smaller passes.
    for device in ("cpu:0", "cpu:1"):
        failed = [oom.micro_batch_size for oom in ooms if oom.device == device]
        share, last = several_workers.shares(run, device)[-1]
        assert share == 48
        sizes = [*failed, last]
        assert sizes[0] == 48
        # Each is less than the one before.
        assert sizes == sorted(set(sizes), reverse=True)
    plain = several_workers.alone(tmp_path / "plain", LARGE, name="weights.npz")
    assert jobs.distance(tmp_path / "weights.npz", plain) < 1e-10
