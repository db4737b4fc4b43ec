"""A kill in a fit whose position and chances are not all Keras's to tell."""

from __future__ import annotations

from pathlib import Path

import jobs

from oomrun.core import events as ev

# Trains in callbacks too, draws in its loss by a generator that no layer holds, and
# has Keras draw the order of the batches as it reads them. The worker is killed in the
# third epoch of four.
SCRIPT = """\
import os
import signal
import time
import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8))
y = np.sin(x @ rng.normal(size=(8, 1)))

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return x[16 * index : 16 * index + 16], y[16 * index : 16 * index + 16]

class Noisy(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
    def call(self, y_true, y_pred):
        noise = keras.random.normal(
            keras.ops.shape(y_pred), dtype="float64", seed=self.seeds
        )
        return keras.ops.square(y_true - y_pred + 0.1 * noise)

class Within(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch % 2:
            self.model.train_on_batch(x[:16], y[:16])
    def on_epoch_end(self, epoch, logs=None):
        self.model.fit(x[:40], y[:40], batch_size=16, verbose=0)

class Killed(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 16 and "OOMRUN_RANK" in os.environ:
            if not os.path.exists("killed"):
                open("killed", "w").close()
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)

model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), Noisy(), metrics=["mae"])
model.fit(Data(), epochs=4, verbose=0, callbacks=[Within(), Killed()])
np.savez("weights.npz", *model.get_weights(), *model.optimizer.variables)
"""


def test_a_resumed_fit_is_the_one_that_was_never_killed(tmp_path: Path) -> None:
    limits = "devices: {cpu: 1, memory: 150MiB}\ncheckpoint: {every: 3 steps}\n"
    job = jobs.make(tmp_path / "job", SCRIPT, limits)
    assert job.run() == 0, job.everything()

    assert [restored.step for restored in job.events(ev.Restored)] == [15]
    status = job.status()
    assert (status["attempts"], status["step"], status["samples"]) == (2, 24, 384)
    assert not [note.text for note in job.events(ev.Noted)]
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10
