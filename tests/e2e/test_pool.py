"""The memory of a limited CPU device: one piece, and batches read before a step."""

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


READS = """
import time, numpy as np, tensorflow as tf
from oomrun.worker import reading_ahead
from oomrun.worker.reading_ahead import ReadAhead

looks, looked = [], []

def pulled(dataset, epochs):
    ahead, found = ReadAhead(), []
    for _ in range(epochs):
        iterator = iter(dataset)
        try:
            while True:
                batch = ahead.pull(iterator)
                found.append(ahead.at_rest)
                looked.append(len(looks))
                del batch
        except (StopIteration, tf.errors.OutOfRangeError):
            continue
    return found

large = tf.data.Dataset.from_tensor_slices(np.zeros([256, 2**14], "float32")).batch(64)
small = tf.data.Dataset.from_tensor_slices(np.zeros([256, 16], "float32")).batch(64)
reading_ahead._PATIENCE_S = 2.0  # on a busy machine
print("AHEAD", pulled(large.prefetch(1), 2))
reading_ahead._PATIENCE_S = 0.02
print("SMALL", pulled(small.prefetch(1), 1))
# What makes batches more slowly than they are trained has none to wait for.
late = large.map(lambda x: tf.py_function(lambda y: time.sleep(0.1) or y, [x], x.dtype))
print("LATE", pulled(late, 1)[1:])
# Where there is none to read ahead, that is not waited for over and over again.
look = tf.config.experimental.get_memory_info
tf.config.experimental.get_memory_info = lambda name: looks.append(0) or look(name)
print("ALONE", pulled(large.take(1), 9))
print("LOOKED", len(set(looked[-9:])) - 1)
pulled(large.take(1), 32)
print("SELDOM", len(set(looked[-28:])) - 1)
"""


@pytest.mark.parametrize("limited", [True, False])
def test_the_next_batch_is_read_before_a_step_begins(
    limited: bool, tmp_path: Path
) -> None:
    devices = "{cpu: 1, memory: [160MiB]}" if limited else "cpu"
    job = jobs.make(tmp_path, READS, f"devices: {devices}\n")
    assert job.run() == 0, job.everything()
    said = job.everything()
    epoch = "True, True, True, False" if limited else "False, False, False, False"
    assert f"AHEAD [{epoch}, {epoch}]" in said
    assert "SMALL [False, False, False, False]" in said
    assert "LATE [False, False, False]" in said
    assert f"ALONE {[False] * 9}" in said
    assert f"LOOKED {3 if limited else 0}" in said  # from the second pull on
    assert f"SELDOM {1 if limited else 0}" in said
