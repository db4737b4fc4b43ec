"""Data in the pool of a limited CPU device: as much in each step as in the trials."""

from __future__ import annotations

import json
from pathlib import Path

import jobs

LIMIT = "devices: {cpu: 1, memory: [160MiB]}\n"

# Batches of 4 MiB, three an epoch, and 9 MiB that are validated with.
LEVELS = """
import json
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.random((192, 128, 128)).astype("float32")
y = rng.random((192, 1)).astype("float32")
# Where TensorFlow has to copy it: at no multiple of 64 bytes.
later = np.ones(144 * 128 * 128 + 16, "float32")
offset = (68 - later.ctypes.data % 64) % 64 // 4
later = later[offset:][:144 * 128 * 128].reshape(144, 128, 128)
levels = []


class Levels(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        in_use = tf.config.experimental.get_memory_info("CPU:0")["current"]
        levels.append((self.epoch, batch, in_use / 2**20))

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


model = keras.Sequential([
    keras.Input((128, 128)),
    keras.layers.Reshape((128, 128, 1)),
    keras.layers.Conv2D(8, 3, activation="relu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(1),
])
model.compile("adam", "mse")
model.fit(
    x, y, batch_size=64, epochs=4, verbose=0, callbacks=[Levels()],
    validation_data=(later, y[:144]),
)
with open("levels.json", "w") as file:
    json.dump(levels, file)
"""


def test_each_epoch_has_as_much_in_use_as_the_first(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, LEVELS, LIMIT)
    assert job.run() == 0, job.everything()
    by_place: dict[int, list[float]] = {}
    for _, batch, in_use in json.loads((tmp_path / "levels.json").read_text()):
        by_place.setdefault(batch, []).append(in_use)
    assert sorted(by_place) == [0, 1, 2]
    for levels in by_place.values():
        assert len(levels) == 4
        # A batch more would be 4 MiB, what is validated with 9.
        assert max(levels) - min(levels) < 2, by_place


WAITS = """
import time
import numpy as np
import tensorflow as tf
from oomrun.worker.fit_call import FitCall
from oomrun.worker.position import EpochIterator
from oomrun.worker.randomness import EpochSeed
from oomrun.worker.read_ahead import Ahead


def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"] / 2**20


def slow(place):
    # A batch that is there a tenth of a second later.
    def wait():
        time.sleep(0.1)
        return 0.0
    late = tf.ensure_shape(tf.py_function(wait, [], tf.float32), [])
    return tf.zeros((64, 128, 128)) + late, tf.zeros((64,)) + late


x = np.random.default_rng(0).random((5 * 64, 128, 128)).astype("float32")
iterator = EpochIterator(
    x=x, y=np.zeros(len(x)), batch_size=64, epoch_seed=EpochSeed(1, 1),
    distribute_strategy=tf.distribute.get_strategy(),
)
assert iterator.waits_for_data
iterator._distributed_dataset = tf.data.Dataset.range(5).map(slow).prefetch(2)
call = FitCall(number=1, fingerprint={}, model=None, iterator=iterator)
ahead = Ahead()
for call.batches, (*_, pulled) in enumerate(iterator):
    ahead.before_batch(call)
    if call.batches == 0:
        rest = in_use()
        print("KEPT APART", len(call.places))
    data = next(pulled)
    at_once = in_use()
    ahead.wait(call, 64 * 2**16)
    print("BATCHES", call.batches, round((at_once - rest) / 4), (in_use() - rest) / 4)
    del data
"""


def test_a_step_waits_for_the_batches_that_are_read_ahead(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, WAITS, LIMIT)
    assert job.run() == 0, job.everything()
    said = job.everything()
    assert "KEPT APART 3" in said
    found = [line.split()[1:] for line in said.splitlines() if "BATCHES" in line]
    assert len(found) == 5, said
    for batch, _, waited in found:
        left = min(3, 5 - int(batch))
        assert left - 0.5 < float(waited) < left + 1.5, found
    assert int(found[0][1]) < 3, "it was all there before: nothing was tried"


IN_VAIN = """
import time
import numpy as np
import tensorflow as tf
from oomrun.worker.fit_call import FitCall
from oomrun.worker.position import EpochIterator
from oomrun.worker.randomness import EpochSeed
from oomrun.worker.read_ahead import Ahead

x = np.zeros((5 * 64, 128, 128), "float32")
iterator = EpochIterator(
    x=x, y=np.zeros(len(x)), batch_size=64, epoch_seed=EpochSeed(1, 1),
    distribute_strategy=tf.distribute.get_strategy(),
)
call = FitCall(number=1, fingerprint={}, model=None, iterator=iterator)
ahead = Ahead()
for epoch in range(4):
    held = tf.zeros((64, 2**18))  # 64 MiB, let go of when a step was taken
    for call.batches, (*_, pulled) in enumerate(iterator):
        ahead.before_batch(call)
        data = next(pulled)
        began = time.monotonic()
        ahead.wait(call, 64 * 2**16)
        if time.monotonic() - began >= 1.0:
            print("IN VAIN", epoch, call.batches)
        held = data = None
"""


def test_what_never_comes_is_not_waited_for_in_each_epoch(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, IN_VAIN, LIMIT)
    assert job.run() == 0, job.everything()
    said = job.everything().splitlines()
    found = [line.split()[2:] for line in said if line.startswith("IN VAIN")]
    assert [epoch for epoch, _ in found] == ["0", "1"], said


AHEAD = """
import time
import tensorflow as tf


def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"] / 2**20


held = tf.random.uniform((1024, 2048))
data = tf.data.Dataset.range(40).map(
    lambda i: tf.gather(held, tf.random.shuffle(tf.range(1024))[:512]),
    num_parallel_calls=tf.data.AUTOTUNE,
).prefetch(tf.data.AUTOTUNE)
OPTIONS
rest, most = in_use(), 0
for place, batch in enumerate(data):
    if place % 5 == 4:
        time.sleep(0.2)
        most = max(most, in_use() - rest)
    del batch
print("MOST", most / 4)
"""
OWN = """
options = tf.data.Options()
options.autotune.ram_budget = 2**30
data = data.with_options(options)
"""


def test_what_is_read_ahead_does_not_grow(tmp_path: Path) -> None:
    """Batches of 4 MiB: there were 8 to 13 of them."""
    most: dict[bool, float] = {}
    for own in (False, True):
        script = AHEAD.replace("OPTIONS", OWN if own else "")
        job = jobs.make(tmp_path / str(own), script, LIMIT)
        assert job.run() == 0, job.everything()
        most[own] = float(job.everything().split("MOST ")[1].split()[0])
    # The one in use, two that are made, and 8 MiB that may wait.
    assert most[False] <= 6.5
    # What the script has said itself stays.
    assert most[True] > most[False], most


VALIDATED = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(4)
keras.backend.set_floatx("float64")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(90, 6)), rng.normal(size=(90, 1))
weights = rng.random(90)
model = keras.Sequential([
    keras.Input((6,)),
    keras.layers.Dense(8, "tanh"),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(1),
])
model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
found = []
for how in (
    {"validation_split": 0.25, "validation_freq": 2},
    {"validation_split": 0.2, "sample_weight": weights, "shuffle": False},
    {"validation_data": (x[:50], y[:50], weights[:50]), "validation_batch_size": 7},
    {"validation_data": (tf.constant(x), tf.constant(y)), "validation_steps": 3},
    {"validation_data": (x, y), "steps_per_epoch": 3},
):
    told = model.fit(x, y, batch_size=16, epochs=4, verbose=0, **how).history
    found += [np.array(values) for _, values in sorted(told.items())]
    found += [np.array(model.evaluate(x, y, batch_size=16, verbose=0))]
np.savez("weights.npz", *model.get_weights(), *found)
"""


def test_what_is_validated_with_and_how_often_is_as_in_plain_keras(
    tmp_path: Path,
) -> None:
    job = jobs.make(tmp_path, VALIDATED, LIMIT)
    assert job.run() == 0, job.everything()
    plain = tmp_path / "plain"
    plain.mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    assert jobs.distance(tmp_path / "weights.npz", plain / "weights.npz") <= 1e-12
