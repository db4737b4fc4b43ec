"""Memory that runs out at every place and moment of a training, by the real command.

Cells of the fault matrix (``matrix``): forward, backward, apply, validation and
checkpoint, at the first step, in the middle and at the last one. Each ends with the
weights of an undisturbed run. Does not cover: other faults (``test_fault_disks``,
``test_fault_processes``).
"""

from __future__ import annotations

from pathlib import Path

import jobs
import matrix
import pytest

from oomrun.core import events as ev

# Two epochs of 3 steps of 16 samples. At step WHEN, what is at WHERE needs 8 MiB a
# sample once more.
SCRIPT = """\
import os
import keras
import numpy as np
import tensorflow as tf

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)
where, when = os.environ.get("WHERE", ""), int(os.environ.get("WHEN", "-1"))
once = where and not os.path.exists("had-enough")

def needs(rows):
    '''Next to nothing, at a price.'''
    now = tf.equal(optimizer.iterations, when)
    count = tf.where(now, tf.cast(rows, "int64") * 2**20, 1)
    # Not 0 times that: Grappler would leave all of it out.
    return 1e-300 * tf.reduce_max(tf.fill([count], tf.cast(0.5, "float64")))

class Greedy(keras.layers.Layer):
    def call(self, inputs, training=False):
        if not once:
            return inputs
        rows = tf.shape(inputs)[0]
        if where == "validation" and not training:
            return inputs + needs(rows)
        if where == "forward" and training:
            return inputs + needs(rows)
        if where == "backward" and training:
            return self.costly(inputs)
        return inputs

    @staticmethod
    @tf.custom_gradient
    def costly(inputs):
        return tf.identity(inputs), lambda above: above + needs(tf.shape(above)[0])

class Optimizer(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        if once and where == "apply" and tuple(variable.shape) == (1,):
            gradient = gradient + needs(16)
        super().update_step(gradient, variable, learning_rate)

class Mark(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        # What is in the optimizer would be there again at the same step.
        if where == "apply" and int(optimizer.iterations.numpy()) == when:
            open("had-enough", "w").close()

optimizer = Optimizer(0.05, momentum=0.9)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 16)), rng.normal(size=(48, 1))
model = keras.Sequential(
    [
        # Not first: nobody asks for the gradients of inputs.
        keras.Input((16,)), keras.layers.Dense(32, "tanh"), Greedy(),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer, "mse")
model.fit(
    x, y, batch_size=16, epochs=2, verbose=2, callbacks=[Mark()], shuffle=False,
    validation_data=(x[:16], y[:16]), validation_batch_size=16,
)
np.savez("weights.npz", *model.get_weights())
"""
LIMITED = (
    "devices: {cpu: 1, memory: 120MiB}\nmemory: {probe: never}\n"
    "checkpoint: {every: 2 steps}\n"
)
# The middle of the second epoch, but for validation, which comes after the first one.
MOMENTS = {"first": 0, "middle": 4, "last": 5}
VALIDATIONS = {"middle": 3, "last": 6}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of plain Keras."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(SCRIPT)
    jobs.python(folder / "train.py", cwd=folder)
    return folder / "weights.npz"


@pytest.mark.parametrize(
    "cell",
    matrix.beginning("oom-forward", "oom-backward", "oom-apply", "oom-validation"),
)
def test_memory_runs_out(tmp_path: Path, undisturbed: Path, cell: str) -> None:
    _, where, moment = cell.split("-")
    when = (VALIDATIONS if where == "validation" else MOMENTS)[moment]
    job = jobs.make(tmp_path / "job", SCRIPT, LIMITED)
    assert job.run(env={"WHERE": where, "WHEN": str(when)}) == 0, job.everything()
    oom = job.events(ev.OomOccurred)[0]
    phases = {"apply": "apply", "validation": "evaluate"}
    assert (oom.phase, oom.step) == (phases.get(where, "gradients"), when)
    status = job.status()
    assert (status["state"], status["step"]) == ("completed", 6)
    assert jobs.distance(job.folder / "weights.npz", undisturbed) <= 1e-10
    # No step of those that were finished was lost, but by writing weights halfway.
    lost = sum(event.lost_steps for event in job.events(ev.Restored))
    assert lost <= (2 if where == "apply" else 0)


# A weight of 128 MiB of which a step reads one row. While the checkpoint of step 4 is
# copied, the process may have no more than a quarter of that.
LARGE = """\
import os, resource
import keras
import numpy as np

keras.utils.set_random_seed(3)

class Scarce(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if os.environ.get("SCARCE") and batch in (3, 5):
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[5]) * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = used + 2**25 if batch == 3 else hard
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

model = keras.Sequential([
    keras.Input((1,), dtype="int32"), keras.layers.Embedding(2**20, 32),
    keras.layers.Flatten(), keras.layers.Dense(1),
])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(
    np.arange(96)[:, None], np.arange(96.0)[:, None] / 96, batch_size=16, verbose=2,
    shuffle=False, callbacks=[Scarce()],
)
weights = model.get_weights()
np.savez("weights.npz", weights[0][:96], *weights[1:])
"""


@pytest.mark.parametrize("cell", matrix.cells(["oom-checkpoint"]))
def test_memory_runs_out_for_a_checkpoint(tmp_path: Path, cell: str) -> None:
    job = jobs.make(
        tmp_path / "job", LARGE, "devices: cpu\ncheckpoint: {every: 4 steps, keep: 1}\n"
    )
    assert job.run(env={"SCARCE": "yes"}) == 0, job.everything()
    (failed,) = job.events(ev.CheckpointFailed)
    assert failed.step == 4
    assert failed.reason == "memory ran out while everything was copied"
    assert "could not be written, training goes on" in job.said()
    # The next one is there again.
    assert job.events(ev.CheckpointSaved)[-1].reason == "fit completed"
    status = job.status()
    assert (status["state"], status["step"], status["attempts"]) == ("completed", 6, 1)
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-6
