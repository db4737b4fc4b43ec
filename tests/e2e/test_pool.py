"""The memory of a limited CPU device is one piece, whatever was allocated first."""

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
