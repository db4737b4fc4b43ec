"""The memory of a limited CPU device is one piece, whatever was allocated first."""

from __future__ import annotations

from pathlib import Path

import jobs

SCRIPT = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(2)  # refused once TensorFlow runs
small = [tf.zeros([300_000 * i]) for i in range(1, 6)]  # 18 MiB: regions of 2, 4, 8 …
large = tf.raw_ops.Empty(shape=[170 * 2**20], dtype=tf.uint8, init=False)
print("ALL OF IT")
"""


def test_nearly_all_of_a_limit_is_one_tensor_s(tmp_path: Path) -> None:
    limit = "devices: {cpu: 1, memory: [200MiB]}\n"
    job = jobs.make(tmp_path, SCRIPT, limit)
    assert job.run() == 0, job.everything()
    assert "ALL OF IT" in job.everything()
