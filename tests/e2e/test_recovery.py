"""Real exhaustions, kills and stops of real Keras scripts, through the real command.

Memory runs out in TensorFlow's own allocator, under the hard limit of a CPU device.
TensorFlow waits 10 s before it says so, hence few tests with much in each.
"""

from __future__ import annotations

import signal
from pathlib import Path

import jobs
import numpy as np
import pytest

from oomrun.core import events as ev

# 0.25 MiB a sample and tensor: a step of 256 takes 201 MiB, one of 128 takes 101. `HOG`
# (in MiB) takes memory away from batch 3 on, as another user of the device would.
IMAGES = """\
import os
import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 8, 8, 1))
y = rng.integers(0, 4, size=1024)

class Hog(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and not hasattr(self, "kept"):
            self.kept = tf.fill([int(os.environ.get("HOG", "1")) * 2**17], 0.5)

model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.UpSampling2D(8),
    keras.layers.Conv2D(8, 3, activation="tanh", padding="same"),
    keras.layers.Conv2D(8, 1, activation="tanh", padding="same"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(4, activation="softmax"),
])
model.compile(
    keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
)
"""
VALIDATED = (
    IMAGES
    + """\
history = model.fit(
    x, y, batch_size=256, epochs=2, verbose=2, callbacks=[Hog()],
    validation_data=(rng.normal(size=(512, 8, 8, 1)), rng.integers(0, 4, size=512)),
    validation_batch_size=512,
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
"""
)
# Tried before training, a size would be found that never runs out of memory.
LIMITED = "devices: {cpu: 1, memory: 240MiB}\nmemory: {probe: never}\n"


def test_training_and_validation_each_shrink_their_own_passes(tmp_path: Path) -> None:
    job = jobs.make(tmp_path / "job", VALIDATED, LIMITED)
    assert job.run(env={"HOG": "115"}) == 0, job.everything()
    ooms = [(o.phase, o.recovery) for o in job.events(ev.OomOccurred)]
    assert set(ooms) == {("gradients", "in_process"), ("evaluate", "in_process")}
    first = job.events(ev.OomOccurred)[0]
    assert (first.step, first.micro_batch_size, first.phase) == (3, 256, "gradients")
    changes = job.events(ev.MicroBatchChanged)
    training = [c.new for c in changes if c.phase == "gradients"]
    # Pitfall 48: what does not fit in validation says nothing of training.
    assert training == [128]
    assert job.events(ev.Progressed)[-1].micro_batch_size == 128
    status = job.status()
    assert (status["attempts"], status["state"]) == (1, "completed")
    assert status["global_batch_size"] == 256
    # Pitfall 52: each exhaustion is kept for a person, and named where it is told.
    names = [f"attempts/0001/oom-{n + 1}.txt" for n in range(len(ooms))]
    assert all(f"(see {name})" in job.said() for name in names)
    assert status["oom_report"] == names[-1]
    report = (job.run_dir.path / names[0]).read_text()
    assert "asked for  64MiB: shape [256, 64, 64, 8] of double" in report
    assert "script     train.py:" in report
    assert "limit    240MiB" in report
    assert "micro-batch 256 -> 128 x 2 (global 256)" in report
    assert "{micro: {max: 128}}" in report
    assert (status["step"], status["samples"]) == (8, 2048)
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    # The history too: losses and metrics of training and validation.
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10
    assert jobs.gone(job)


STEPS = (
    IMAGES
    + """\
model.fit(x, y, batch_size=256, epochs=2, verbose=2, callbacks=[Hog()])
np.savez("weights.npz", *model.get_weights())
"""
)


def test_without_recovery_in_process_a_restart_loses_no_step(tmp_path: Path) -> None:
    job = jobs.make(
        tmp_path / "job", STEPS, LIMITED + "recovery: {in_process: never}\n"
    )
    assert job.run(env={"HOG": "115"}) == 0, job.everything()
    ooms = job.events(ev.OomOccurred)
    assert [(o.phase, o.recovery, o.step) for o in ooms] == [
        ("gradients", "restart", 3)
    ]
    saved = [c for c in job.events(ev.CheckpointSaved) if c.reason == "out of memory"]
    assert [c.step for c in saved] == [3]
    (restored,) = job.events(ev.Restored)
    assert (restored.name, restored.step) == (saved[0].name, 3)
    assert restored.lost_steps == 0
    decision = job.events(ev.DecisionMade)[0]
    assert (decision.action, decision.micro_batch_size) == ("restart", 128)
    assert "256 -> 128" in decision.reason
    report = job.run_dir.oom_report(1, 1).read_text()
    assert f"restart: {decision.reason}" in report
    status = job.status()
    assert status["restarts"] == {
        "oom": 1,
        "crash": 0,
        "preemption": 0,
        "hang": 0,
        "leak": 0,
    }
    assert (status["attempts"], status["samples"]) == (2, 2048)
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10
    assert jobs.gone(job)


APPLY = """\
import os
import keras
import numpy as np
import tensorflow as tf

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
greedy = os.environ.get("GREEDY") == "1" and not os.path.exists("was-greedy")

class Greedy(keras.optimizers.SGD):
    '''Needs memory in the middle of writing the weights of its fifth step.'''

    def update_step(self, gradient, variable, learning_rate):
        if greedy and tuple(variable.shape) == (1,):
            needed = tf.where(self.iterations >= 4, tf.constant(2**31, "int64"), 1)
            most = tf.reduce_max(tf.random.uniform([needed], dtype="float64"))
            gradient = gradient + 1e-300 * most
        super().update_step(gradient, variable, learning_rate)

class Mark(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if greedy and batch == 4:
            open("was-greedy", "w").close()

model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
)
model.compile(Greedy(0.05, momentum=0.9), "mse")
model.fit(
    rng.normal(size=(64, 16)), rng.normal(size=(64, 1)), batch_size=8, epochs=2,
    verbose=2, callbacks=[Mark()],
)
np.savez("weights.npz", *model.get_weights())
"""


def test_out_of_memory_while_weights_are_written_goes_back_to_a_checkpoint(
    tmp_path: Path,
) -> None:
    job = jobs.make(tmp_path / "job", APPLY, LIMITED + "checkpoint: {every: 3 steps}\n")
    assert job.run(env={"GREEDY": "1"}) == 0, job.everything()
    # Pitfall 46: half of the weights may be new, so that nothing goes on in place
    # and nothing is saved.
    ooms = job.events(ev.OomOccurred)
    assert [(o.phase, o.recovery, o.step) for o in ooms] == [("apply", "restart", 4)]
    reasons = {c.reason for c in job.events(ev.CheckpointSaved)}
    assert reasons == {"schedule", "fit completed"}
    (restored,) = job.events(ev.Restored)
    assert (restored.step, restored.lost_steps) == (3, 1)
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10


HUGE = """\
import keras
import numpy as np

model = keras.Sequential([
    keras.Input((8, 8, 1)), keras.layers.UpSampling2D(1024),
    keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1),
])
model.compile("sgd", "mse")
model.fit(np.ones((4, 8, 8, 1)), np.ones((4, 1)), batch_size=2, verbose=2)
"""


def test_one_sample_that_does_not_fit_ends_with_what_was_tried(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, HUGE, LIMITED)
    assert job.run() == 3, job.everything()
    assert [o.micro_batch_size for o in job.events(ev.OomOccurred)] == [2, 1]
    assert "micro-batch 1" in job.said()
    assert "even one sample at a time does not fit" in job.said()
    assert "Traceback" not in job.said()
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("failed", 3)


TWO_FITS = """\
import os
import signal
import sys
import keras
import numpy as np
import tensorflow as tf

SEEDED = os.environ.get("SEEDED") == "1"
if SEEDED:
    keras.utils.set_random_seed(5)
rng = np.random.default_rng(0)

class Seen(keras.layers.Layer):
    '''Counts how often each sample was trained; saved and restored as any weight.'''

    def build(self, shape):
        self.counts = self.add_weight(
            shape=(60,), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            ids = tf.cast(x[:, :1], "int32")
            ones = tf.ones(tf.shape(ids)[:1], "int32")
            self.counts.assign(
                tf.tensor_scatter_nd_add(self.counts.value, ids, ones)
            )
        return x[:, 1:]

class Epochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        counts = self.model.layers[0].counts.numpy()
        assert (counts == epoch + 1).all(), (epoch, counts)

class Killed(keras.callbacks.Callback):
    '''Kills the process once, in the middle of an epoch.'''

    def __init__(self, name, epoch, batch):
        super().__init__()
        self.name, self.at = name, (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        marker = f"killed-{self.name}"
        if (
            self.name in os.environ.get("KILLED", "").split()
            and (self.epoch, batch) == self.at
            and not os.path.exists(marker)
        ):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

def make():
    model = keras.Sequential([
        keras.Input((5,)), Seen(), keras.layers.Dense(8, "relu"),
        keras.layers.Dropout(0.3), keras.layers.Dense(1),
    ])
    model.compile("adam", "mse")
    return model

x = np.concatenate([np.arange(60.0)[:, None], rng.normal(size=(60, 4))], 1)
y = rng.normal(size=(60, 1))
first = make()
one = first.fit(
    x.astype("float32"), y, batch_size=8, epochs=3, verbose=2,
    callbacks=[Epochs(), Killed("first", 1, 5)],
)
print("first fit", one.history["loss"], np.random.random())
second = make()
data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
data = data.shuffle(60).batch(8)
two = second.fit(
    data, epochs=3, verbose=2, callbacks=[Epochs(), Killed("second", 2, 6)],
)
third = second.fit(
    data, epochs=1, verbose=2, callbacks=[Killed("third", 0, 0)],
)
assert (second.layers[0].counts.numpy() == 4).all()
np.savez(
    "weights.npz", *first.get_weights(), *second.get_weights(),
    one.history["loss"], two.history["loss"], third.history["loss"],
    np.random.random(), keras.random.uniform((2,)).numpy(),
)
"""
EVERY_TWO = LIMITED + "checkpoint: {every: 2 steps}\n"


def test_a_script_with_three_fits_goes_on_in_the_one_that_was_killed(
    tmp_path: Path,
) -> None:
    job = jobs.make(tmp_path / "job", TWO_FITS, EVERY_TWO)
    killed = "first second third"
    assert job.run(env={"SEEDED": "1", "KILLED": killed}) == 0, job.everything()
    assert {p.name for p in job.folder.glob("killed-*")} == {
        "killed-first", "killed-second", "killed-third",
    }  # fmt: skip
    restored = [e for e in job.events(ev.Restored) if e.name]
    # Epochs have 8 steps. What was being written when the kill came may be lost.
    assert [e.fit for e in restored] == [1, 2]
    assert restored[0].step in (10, 12)
    assert restored[1].step in (24 + 20, 24 + 22)
    replayed = [e for e in job.events(ev.FitEnded) if e.replayed]
    assert [e.fit for e in replayed] == [1, 1, 2]
    status = job.status()
    assert status["step"] == 56
    assert status["restarts"]["crash"] == 3
    jobs.python(job.folder / "train.py", cwd=tmp_path, env={"SEEDED": "1"})
    assert jobs.identical(job.folder / "weights.npz", tmp_path / "weights.npz")
    assert jobs.gone(job)


def test_an_unseeded_script_sees_every_sample_once_an_epoch(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, TWO_FITS, EVERY_TWO)
    # The script itself counts, and fails where a sample was left out or seen twice.
    assert job.run(env={"KILLED": "first second"}) == 0, job.everything()
    assert job.status()["restarts"]["crash"] == 2
    notes = [note.code for note in job.events(ev.Noted)]
    assert "data-not-repeated" not in notes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise ValueError('no such column')", "ValueError at train.py:2"),
        ("import sys; sys.exit(3)", "exited with 3"),
    ],
)
def test_a_script_that_fails_by_itself_is_not_tried_again(
    tmp_path: Path, line: str, said: str
) -> None:
    # Whatever we keep from the garbage collector, the script has it.
    begun = "import gc; print('begun', gc.isenabled(), gc.get_freeze_count() > 0)"
    job = jobs.make(tmp_path, f"{begun}\n{line}\n", LIMITED)
    assert job.run() == 1
    assert said in job.said()
    assert job.status()["attempts"] == 1
    assert job.log(1).count("begun") == job.log(1).count("begun True True") == 1
    # The script's own traceback, without our frames in it.
    assert "oomrun/worker" not in job.log(1)


SLOW = """\
import time
import keras
import numpy as np

keras.utils.set_random_seed(11)
rng = np.random.default_rng(0)
model = keras.Sequential([
    keras.Input((8,)), keras.layers.Dense(16, "relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)

history = model.fit(
    rng.normal(size=(160, 8)), rng.normal(size=(160, 1)), batch_size=16, epochs=4,
    validation_split=0.2, verbose=2,
    callbacks=[Slow(), keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=1.0)],
)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *values)
"""


def test_sigterm_leaves_a_checkpoint_from_which_the_next_call_goes_on(
    tmp_path: Path,
) -> None:
    job = jobs.make(tmp_path / "job", SLOW, LIMITED)
    process = job.start()
    job.wait_for(ev.Progressed, lambda event: event.step >= 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, job.everything()
    assert jobs.gone(job)
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert "the same command goes on" in job.said()
    (saved,) = job.events(ev.CheckpointSaved)
    assert saved.reason == "stop"
    assert 3 <= saved.step < 32
    assert job.run() == 0, job.everything()
    (restored,) = job.events(ev.Restored)
    assert (restored.step, restored.lost_steps) == (saved.step, 0)
    assert job.status()["step"] == 32
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    assert jobs.identical(job.folder / "weights.npz", tmp_path / "weights.npz")
    before = np.array(jobs.arrays(tmp_path / "weights.npz")[-1])
    # A third call has nothing to do, and says so.
    assert job.run() == 0
    assert "this run is complete" in job.said()
    assert (jobs.arrays(job.folder / "weights.npz")[-1] == before).all()
