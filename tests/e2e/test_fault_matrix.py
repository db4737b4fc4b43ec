"""Faults at every place and moment of a training, through the real command.

Covers: memory that runs out in forward, backward, apply and validation, at the first
step, in the middle and at the last one; crashes of the script once, always, and every
third time; a full disk for checkpoints. Each ends with the weights of an undisturbed
run, or with a documented exit code. All of it is of `make chaos`.
Does not cover: kills (``benchmarks.kills``), damaged checkpoints and journals
(``tests/unit/test_checkpoint_faults.py``, ``test_journal_faults.py``).
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

# 6 steps of 16 samples. At step WHEN, what is at WHERE needs 8 MiB a sample once more.
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
x, y = rng.normal(size=(96, 16)), rng.normal(size=(96, 1))
model = keras.Sequential(
    [
        # Not first: nobody asks for the gradients of inputs.
        keras.Input((16,)), keras.layers.Dense(32, "tanh"), Greedy(),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer, "mse")
model.fit(
    x, y, batch_size=16, epochs=1, verbose=2, callbacks=[Mark()], shuffle=False,
    validation_data=(x[:16], y[:16]), validation_batch_size=16,
)
np.savez("weights.npz", *model.get_weights())
"""
LIMITED = (
    "devices: {cpu: 1, memory: 120MiB}\nmemory: {probe: never}\n"
    "checkpoint: {every: 2 steps}\n"
)
# Validation comes after the last step: its moment is that of six steps.
MOMENTS = {"first": 0, "middle": 3, "last": 5}
CELLS = [
    *(
        (where, moment)
        for where in ("forward", "backward", "apply")
        for moment in MOMENTS
    ),
    ("validation", "last"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of plain Keras."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(SCRIPT)
    jobs.python(folder / "train.py", cwd=folder)
    return folder / "weights.npz"


@pytest.mark.slow
@pytest.mark.parametrize(("where", "moment"), CELLS)
def test_memory_runs_out(
    tmp_path: Path, undisturbed: Path, where: str, moment: str
) -> None:
    when = 6 if where == "validation" else MOMENTS[moment]
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


CRASHES = """\
import os
import keras
import numpy as np

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)
kind = os.environ.get("CRASH", "")
made = len([name for name in os.listdir(".") if name.startswith("start-")])
open(f"start-{made}", "w").close()

class Crash(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        now = int(model.optimizer.iterations.numpy())
        if kind == "once" and made == 0 and now == 3:
            raise ValueError("once")
        if kind == "always" and now == 3:
            raise ValueError("always")
        if kind == "third" and made < 2 and now == 3 * (made + 1):
            raise ValueError("every third step")

rng = np.random.default_rng(0)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
model.fit(
    rng.normal(size=(96, 16)), rng.normal(size=(96, 1)), batch_size=16, epochs=1,
    verbose=2, callbacks=[Crash()],
)
np.savez("weights.npz", *model.get_weights())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "attempts"), [("once", 0, 2), ("always", 1, 2), ("third", 0, 3)]
)
def test_the_script_crashes(
    tmp_path: Path, kind: str, code: int, attempts: int
) -> None:
    job = jobs.make(
        tmp_path / "job", CRASHES, "devices: cpu\ncheckpoint: {every: 2 steps}\n"
    )
    assert job.run(env={"CRASH": kind}) == code, job.everything()
    assert job.status()["attempts"] == attempts
    if code == 0:
        (tmp_path / "plain").mkdir()
        jobs.python(job.folder / "train.py", cwd=tmp_path / "plain")
        found = job.folder / "weights.npz"
        assert jobs.distance(found, tmp_path / "plain" / "weights.npz") <= 1e-12
    else:
        # At the same place, with no step between: not a third time.
        assert "the same would happen again" in job.said()


FULL = (
    CRASHES.replace(
        "rng = np.random.default_rng(0)",
        """class Full(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        # From the fourth step on no file may grow beyond 1 KiB, as on a full disk.
        if batch == 3:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        if batch == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
rng = np.random.default_rng(0)""",
    )
    .replace("callbacks=[Crash()]", "callbacks=[Full()]")
    .replace("verbose=2", "verbose=0")
)


@pytest.mark.slow
def test_a_full_disk_for_checkpoints_does_not_end_training(tmp_path: Path) -> None:
    job = jobs.make(
        tmp_path / "job",
        FULL.replace("import os\n", "import os, resource, signal\n"),
        "devices: cpu\ncheckpoint: {every: 1 steps}\n",
    )
    assert job.run() == 0, job.everything()
    failed = job.events(ev.CheckpointFailed)
    assert {event.step for event in failed} & {4, 5}
    assert all("File too large" in event.reason for event in failed)
    # Loud, and counted.
    assert "could not be written, training goes on" in job.said()
    assert any("File too large" in note for note in job.status()["notes"])
    assert job.events(ev.CheckpointSaved)[-1].reason == "fit completed"
