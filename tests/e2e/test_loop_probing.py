"""A custom loop's micro-batch is found before its first step, too."""

from __future__ import annotations

from pathlib import Path

import jobs

from oomrun.core import events as ev

SCRIPT = """
import sys
import keras
import numpy as np
import tensorflow as tf
import oomrun

tf.config.threading.set_inter_op_parallelism_threads(1)
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 24, 24, 4))
y = rng.integers(0, 3, size=256)
model = keras.Sequential([
    keras.Input((24, 24, 4)),
    keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
    keras.layers.Conv2D(WIDTH, 3, activation="relu", padding="same"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(3),
])
seen = keras.metrics.Sum()
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss(batch):
    images, labels = batch
    seen.update_state(tf.ones_like(labels))
    return crossentropy(labels, model(images, training=True))


data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128)
loop = oomrun.Loop(loss, keras.optimizers.Adam(1e-3), state=[model, seen])
for epoch in loop.epochs(2):
    for batch in loop.batches(data):
        loop.step(batch)
np.savez(sys.argv[1], *model.get_weights(), seen.result())
"""
LIMIT = "devices: {cpu: 1, memory: [95MiB]}\nargs: [weights.npz]\n"


def test_a_loop_s_sizes_are_tried_remembered_and_leave_no_trace(tmp_path: Path) -> None:
    script = SCRIPT.replace("WIDTH", "32")
    job = jobs.make(tmp_path, script, LIMIT)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred)
    assert 1 <= len(job.events(ev.Probed)) <= 3
    (planned,) = job.events(ev.MicroBatchPlanned)
    assert 1 < planned.micro_batch_size < planned.global_batch_size == 128
    assert job.events(ev.Progressed)[-1].micro_batch_size == planned.micro_batch_size
    alone = tmp_path / "alone.npz"
    jobs.python(job.folder / "train.py", str(alone), cwd=tmp_path)
    # The metric among them has seen each sample as often as without trials.
    assert jobs.distance(job.folder / "weights.npz", alone) <= 1e-10

    assert job.run("--fresh") == 0, job.everything()
    assert not job.events(ev.Probed)
    assert not job.events(ev.OomOccurred)

    other = SCRIPT.replace("WIDTH", "24")
    (job.folder / "train.py").write_text(other)
    assert job.run("--fresh") == 0, job.everything()
    assert job.events(ev.Probed), "a changed model used what another had measured"
