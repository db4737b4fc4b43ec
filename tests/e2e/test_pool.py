"""The memory of a limited CPU device is one piece, and what a step returns no split."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(2)  # refused once TensorFlow runs
small = [tf.zeros([300_000 * i]) for i in range(1, 6)]  # 18 MiB: regions of 2, 4, 8 …
large = tf.raw_ops.Empty(shape=[170 * 2**20], dtype=tf.uint8, init=False)
print("ALL OF IT")
"""


# The last one is more bytes than 32 bits can count.
@pytest.mark.parametrize("limit", ["200MiB", "5GiB"])
def test_nearly_all_of_a_limit_is_one_tensor_s(limit: str, tmp_path: Path) -> None:
    job = jobs.make(tmp_path, SCRIPT, f"devices: {{cpu: 1, memory: [{limit}]}}\n")
    assert job.run() == 0, job.everything()
    assert "ALL OF IT" in job.everything()


RETURNED = """
import numpy as np
import tensorflow as tf
from oomrun.worker.engine import returning

def empty(mib):
    return tf.raw_ops.Empty(shape=[mib * 2**20], dtype=tf.uint8, init=False)

def step():
    # Of all that is small there is little room below.
    small = [tf.raw_ops.Empty(shape=[2048], dtype=tf.uint8) for _ in range(1200)]
    large = empty(90)
    return {"loss": tf.fill([1024], 2.0)}  # lies above both

def room():
    try:
        return bool(empty(120).shape)
    except tf.errors.ResourceExhaustedError:
        return False

logs = step()
print("BEFORE", room())
logs = returning.aside(logs)
print("AFTER", room())

kinds = (tf.float32, tf.bfloat16, tf.float64, tf.int64, tf.bool)
logs = {
    "z": tf.ones([]) * 2, "in": {kind.name: tf.cast([0, 3], kind) for kind in kinds},
    "name": tf.constant("a"), "plain": 1.5, "none": None, "large": tf.ones([5000]),
    "ragged": tf.ragged.constant([[1], [2, 3]]),
}
put = returning.aside(logs)
assert list(put) == list(logs) and put["large"] is logs["large"]
assert put["plain"] == 1.5 and put["none"] is None
assert put["ragged"].to_list() == [[1], [2, 3]]
for one, other in zip(tf.nest.flatten(put, True), tf.nest.flatten(logs, True)):
    if isinstance(one, tf.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one.numpy(), other.numpy())
print("SAME", put["z"] is logs["z"])
"""


@pytest.mark.parametrize("limited", [True, False])
def test_what_a_step_returns_does_not_split_what_the_next_one_needs(
    limited: bool, tmp_path: Path
) -> None:
    devices = "{cpu: 1, memory: [200MiB]}" if limited else "cpu"
    job = jobs.make(tmp_path, RETURNED, f"devices: {devices}\n")
    assert job.run() == 0, job.everything()
    said = job.everything()
    assert f"BEFORE {not limited}" in said
    assert f"SAME {not limited}" in said
    assert "AFTER True" in said


LOOKED_UP = """
import tensorflow as tf
from oomrun.worker.engine.gradients import GradientSum

table = tf.Variable(tf.zeros([50, 32]))
SAMPLES, MICRO, EACH = 4000, 300, 100  # 49 MiB of gradients

@tf.function
def step(samples, micro):
    def gradient(count):
        values = tf.fill([count * EACH, 32], tf.cast(count, tf.float32))
        return tf.IndexedSlices(values, tf.zeros([count * EACH], tf.int32))

    total = GradientSum([gradient(micro)], [table], samples, micro)

    def body(index, *state):
        count = tf.minimum(samples - index * micro, micro)
        return (index + 1, *total.add(state, index, [gradient(count)]))

    _, *state = tf.while_loop(
        lambda index, *_: index * micro < samples, body, (0, *total.zeros()),
        parallel_iterations=1,
    )
    (found,) = total.result(state)
    return tf.reduce_sum(found.values), tf.size(found.indices)

total, rows = step(tf.constant(SAMPLES), tf.constant(MICRO))
assert rows == SAMPLES * EACH
print("SUM", float(total) / 32 / EACH)
print("PEAK", tf.config.experimental.get_memory_info("CPU:0")["peak"] >> 20)
"""


def test_rows_of_a_sparse_gradient_are_there_once(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, LOOKED_UP, "devices: {cpu: 1, memory: [200MiB]}\n")
    assert job.run() == 0, job.everything()
    said = job.everything()
    assert f"SUM {13 * 300.0**2 + 100.0**2}" in said
    # Of a free piece that is not twice as large TensorFlow hands out all.
    assert int(said.split("PEAK ")[1].split()[0]) < 80
