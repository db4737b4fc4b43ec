"""Sizes are tried before the first step, and nothing is trained by it."""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np

from oomrun.core import events as ev

# Whatever a step may change: weights, slots, statistics, seeds, generators that no
# variable holds, metrics.
SCRIPT = """
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 40, 40, 4)).astype("float32")
y = rng.integers(0, 3, size=256)
model = keras.Sequential([
    keras.Input((40, 40, 4)),
    keras.layers.Conv2D(48, 3, activation="relu", padding="same"),
    keras.layers.BatchNormalization(),
    keras.layers.Dropout(0.3),
    keras.layers.Lambda(lambda h: h + tf.random.normal(tf.shape(h), stddev=0.1)),
    keras.layers.Conv2D(48, 3, activation="relu", padding="same"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(3, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=128, epochs=2, verbose=2, validation_split=0.25)
values = [np.array(v) for _, v in sorted(history.history.items())]
np.savez("weights.npz", *model.get_weights(), *model.optimizer.variables, *values)
"""
LIMIT = "devices: {cpu: 1, memory: [150MiB]}\n"


def test_trying_sizes_leaves_no_trace(tmp_path: Path) -> None:
    tried = jobs.make(tmp_path / "tried", SCRIPT, LIMIT)
    assert tried.run() == 0, tried.everything()
    assert not tried.events(ev.OomOccurred)
    probes, planned = tried.events(ev.Probed), tried.events(ev.MicroBatchPlanned)
    assert 1 <= len(probes) <= 3
    ((batch, size),) = ((p.global_batch_size, p.micro_batch_size) for p in planned)
    assert 1 < size < batch == 128

    # With room to spare: another process may take the operations in another order.
    roomy = LIMIT.replace("150MiB", "900MiB")
    told = jobs.make(tmp_path / "told", SCRIPT, roomy + f"batch: {{micro: {size}}}\n")
    assert told.run() == 0, told.everything()
    assert not told.events(ev.Probed)
    with (
        np.load(tried.folder / "weights.npz") as found,
        np.load(told.folder / "weights.npz") as wanted,
    ):
        assert found.files == wanted.files
        for name in found.files:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_a_second_run_of_a_job_tries_nothing(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, SCRIPT, LIMIT)
    assert job.run() == 0, job.everything()
    (first,) = job.events(ev.MicroBatchPlanned)
    assert job.run("--fresh") == 0, job.everything()
    assert not job.events(ev.Probed)
    assert not job.events(ev.OomOccurred)
    (second,) = job.events(ev.MicroBatchPlanned)
    # What training itself has taken since counts too.
    assert second.micro_batch_size >= 0.7 * first.micro_batch_size

    other = SCRIPT.replace("Conv2D(48, 3", "Conv2D(40, 3", 1)
    (job.folder / "train.py").write_text(other)
    assert job.run("--fresh") == 0, job.everything()
    assert job.events(ev.Probed), "a changed model used what another had measured"


REPEATING = """
import keras
import numpy as np

keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
model = keras.Sequential([
    keras.Input((24,)),
    keras.layers.Dense(16),
    keras.layers.RepeatVector(1024),
    keras.layers.Activation("tanh"),
    keras.layers.Activation("sigmoid"),
    keras.layers.Activation("tanh"),
    keras.layers.GlobalAveragePooling1D(),
    keras.layers.Dense(1),
])
model.compile("adam", "mse")
model.fit(rng.normal(size=(384, 24)), rng.normal(size=384), batch_size=192, verbose=0)
"""


def test_what_the_graph_s_analysis_does_not_see_is_tried(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, REPEATING, "devices: {cpu: 1, memory: [40MiB]}\n")
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    assert 1 <= len(job.events(ev.Probed)) <= 3
    (planned,) = job.events(ev.MicroBatchPlanned)
    assert 1 < planned.micro_batch_size < 192


LONGER_LATER = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)


def batches():
    for length in [20, 20, 24, 30, 200, 210, 40]:
        yield rng.normal(size=(128, length, 16)), rng.integers(0, 3, size=128)


data = tf.data.Dataset.from_generator(batches, output_signature=(
    tf.TensorSpec((128, None, 16), tf.float32), tf.TensorSpec((128,), tf.int64),
))
model = keras.Sequential([
    keras.Input((None, 16)),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.GlobalAveragePooling1D(),
    keras.layers.Dense(3, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy")
model.fit(data, epochs=2, verbose=0)
"""


def test_longer_sequences_than_those_tried_do_not_run_out(tmp_path: Path) -> None:
    limit = "devices: {cpu: 1, memory: [100MiB]}\n"
    job = jobs.make(tmp_path, LONGER_LATER, limit)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    assert not any(p.peak_bytes is None for p in job.events(ev.Probed)), job.said()
    first, *others = job.events(ev.MicroBatchPlanned)
    assert first.micro_batch_size == 128
    assert [p.micro_batch_size < 128 for p in others] == [True], job.said()
