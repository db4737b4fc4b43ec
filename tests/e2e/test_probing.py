"""Sizes are tried before the first step, and nothing is trained by it."""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np

from oomrun.core import events as ev

# Whatever a step may change: weights, slots, statistics, seeds, generators that no
# variable holds, metrics; and a second fit of a larger batch.
SCRIPT = """
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(512, 16, 16, 4)).astype("float32")
y = rng.integers(0, 3, size=512)
model = keras.Sequential([
    keras.Input((16, 16, 4)),
    keras.layers.Conv2D(48, 3, activation="relu", padding="same"),
    keras.layers.BatchNormalization(),
    keras.layers.Dropout(0.3),
    keras.layers.Lambda(lambda h: h + tf.random.normal(tf.shape(h), stddev=0.1)),
    keras.layers.Conv2D(48, 3, activation="relu", padding="same"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(3, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
histories = [
    model.fit(x, y, batch_size=size, epochs=1, verbose=2, validation_split=0.25)
    for size in (128, 256)
]
values = [np.array(v) for h in histories for _, v in sorted(h.history.items())]
np.savez("weights.npz", *model.get_weights(), *model.optimizer.variables, *values)
"""
LIMIT = "devices: {cpu: 1, memory: [90MiB]}\n"


def test_trying_sizes_leaves_no_trace(tmp_path: Path) -> None:
    tried = jobs.make(tmp_path / "tried", SCRIPT, LIMIT)
    assert tried.run() == 0, tried.everything()
    assert not tried.events(ev.OomOccurred)
    probes, planned = tried.events(ev.Probed), tried.events(ev.MicroBatchPlanned)
    assert probes
    assert [p.global_batch_size for p in planned] == [128, 256]
    assert len({p.micro_batch_size for p in planned}) == 1
    (size, _) = (p.micro_batch_size for p in planned)
    assert size < 128

    told = jobs.make(tmp_path / "told", SCRIPT, LIMIT + f"batch: {{micro: {size}}}\n")
    assert told.run() == 0, told.everything()
    assert not told.events(ev.Probed)
    with (
        np.load(tried.folder / "weights.npz") as found,
        np.load(told.folder / "weights.npz") as wanted,
    ):
        assert found.files == wanted.files
        for name in found.files:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
