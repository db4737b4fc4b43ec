"""Levers beside the micro-batch: each one lets a real job run that did not fit.

Memory runs out in TensorFlow's own allocator, under the hard limit of a CPU device. No
job here may make its micro-batch smaller, so that what helps is the lever.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

# Each of 12 layers keeps 4 MiB of a batch of 64 in float32.
DEEP = """\
import json
import sys

import keras
import numpy as np
import tensorflow as tf

# One operation at a time: else a step's peak hangs on chance.
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 64, 64, 1)).astype("float32")
y = rng.integers(0, 4, size=256)
layers = [keras.layers.Conv2D(4, 1, activation="gelu") for _ in range(9)]
model = keras.Sequential([
    keras.Input((64, 64, 1)), *layers, keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(4, activation="softmax", dtype="float32"),
])
model.compile("adam", "sparse_categorical_crossentropy", jit_compile="xla" in sys.argv)
history = model.fit(x, y, batch_size=64, epochs=1, verbose=2, shuffle=False)
np.savez("weights.npz", *model.get_weights())
with open("seen.json", "w") as file:
    json.dump([layers[0].compute_dtype, model.jit_compile], file)
"""


def run(
    folder: Path, levers: str, memory: str, script: str = DEEP, args: str = "[]"
) -> jobs.Job:
    """A job that may pull these levers only, run to its end."""
    job = jobs.make(
        folder,
        script,
        f"args: {args}\ndevices: {{cpu: 1, memory: {memory}}}\n"
        f"memory: {{probe: never}}\nrecovery: {{levers: [{levers}]}}\n",
    )
    assert job.run() == 0, job.everything()
    return job


def pulled(job: jobs.Job) -> list[tuple[str, ...] | None]:
    return [d.levers for d in job.events(ev.DecisionMade) if d.action == "restart"]


def shows(job: jobs.Job, lever: str) -> None:
    """The lever is told wherever one looks, and the micro-batch is whole."""
    assert pulled(job) == [(lever,)], job.everything()
    assert job.status()["levers"] == [lever]
    assert f"lever {lever} (" in job.said()
    sizes = {
        (p.micro_batch_size, p.global_batch_size) for p in job.events(ev.Progressed)
    }
    assert {micro == whole for micro, whole in sizes} == {True}
    assert job.events(ev.AttemptStarted)[-1].plan["levers"] == [lever]
    assert len(job.events(ev.OomOccurred)) == 1


def test_recomputing_lets_a_deep_model_train_as_it_is(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "recompute", "120MiB")
    shows(job, "recompute")
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    # The same model: what is computed twice is the same twice, but for rounding.
    assert jobs.distance(job.folder / "weights.npz", tmp_path / "weights.npz") <= 1e-3


@pytest.mark.slow
def test_mixed_precision_halves_what_layers_keep(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "mixed_precision", "120MiB")
    shows(job, "mixed_precision")
    assert (job.folder / "seen.json").read_text() == '["bfloat16", false]'
    notes = " ".join(job.status()["notes"])
    assert "bfloat16" in notes


@pytest.mark.slow
def test_without_xla_a_step_needs_none_of_its_buffers(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "xla_off", "190MiB", args="[xla]")
    shows(job, "xla_off")
    assert (job.folder / "seen.json").read_text() == '["float32", false]'


ELEMENTWISE = DEEP.replace(
    'layers = [keras.layers.Conv2D(4, 1, activation="gelu") for _ in range(9)]',
    '''class Many(keras.layers.Layer):
    """Eighty operations whose results only the next one needs."""

    def call(self, inputs):
        for n in range(80):
            inputs = tf.stop_gradient(inputs * 0.5 + tf.sin(inputs) * (n + 1) / 80)
            kept.append(inputs)
        return tf.add_n([value * 1e-3 for value in kept])

kept = []
layers = [keras.layers.Conv2D(4, 1), Many()]''',
).replace(
    "        for n in range(80)", "        kept.clear()\n        for n in range(80)"
)


@pytest.mark.slow
def test_xla_fuses_what_would_be_in_memory_in_between(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "xla_on", "120MiB", ELEMENTWISE)
    shows(job, "xla_on")
    assert (job.folder / "seen.json").read_text() == '["float32", true]'


@pytest.mark.slow
def test_levers_are_pulled_in_the_order_of_the_job_file(tmp_path: Path) -> None:
    job = run(tmp_path / "job", "recompute, mixed_precision, micro_batch", "40MiB")
    steps = [levers for levers in pulled(job) if levers is not None]
    assert steps == [("recompute",), ("recompute", "mixed_precision")]
    # Only then is the micro-batch made smaller, in process.
    ooms = [(o.attempt, o.recovery) for o in job.events(ev.OomOccurred)]
    assert ooms[:2] == [(1, "restart"), (2, "restart")]
    assert all(recovery == "in_process" for _, recovery in ooms[2:])
