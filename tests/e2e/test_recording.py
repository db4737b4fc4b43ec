"""Steps that are really recorded, under the allocator's real limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

# Each step is recorded at two sizes; the smaller one has to tell what the larger takes.
SCRIPT = """
import json
import tensorflow as tf
from oomrun.core import allocations
from oomrun.worker.engine import recording

tf.config.threading.set_inter_op_parallelism_threads(1)
LIMIT = 100 * 2**20
weights = tf.Variable(tf.random.normal((64, 512)))
out = tf.Variable(tf.random.normal((512, 64)))

@tf.function(reduce_retracing=True)
def step(x):
    with tf.GradientTape() as tape:
        h = tf.nn.relu(x @ weights)
        loss = tf.reduce_sum(tf.sin(tf.cos(h)) @ out)
    for v, g in zip((weights, out), tape.gradient(loss, (weights, out))):
        v.assign_sub(1e-6 * g)
    return loss

def memory():
    return tf.config.experimental.get_memory_info("CPU:0")

def record(rows):
    x = tf.random.normal((rows, 64))
    step(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    found = recording.record(
        lambda: step(x).numpy(), rows, allocator=recording.CPU_ALLOCATOR,
        in_use_bytes=memory()["current"], pool_bytes=LIMIT, telling=True,
    )
    return found, memory()["peak"]

step(tf.random.normal((3, 64))), step(tf.random.normal((5, 64)))
small, small_peak = record(1009)
large, peak = record(4999)
then = allocations.at_size(small, 4999)
said = {
    "predicted": allocations.needed_bytes(then),
    "needed": allocations.needed_bytes(large),
    "least": allocations.least_pool(large),
    "peak": peak,
    "replayed": allocations.pool_peak(large, LIMIT),
    "of the small one": [
        allocations.pool_peak(small, LIMIT), small_peak,
    ],
}

tf.profiler.experimental.start("profile")  # the script's own
said["beside another"] = record(1009)[0] is None
tf.profiler.experimental.stop()
said["their profile"] = bool(tf.io.gfile.glob("profile/plugins/profile/*/*.xplane.pb"))
try:
    record(2 * 200_003)
except tf.errors.ResourceExhaustedError:
    said["exhausted"] = True
said["after that"] = record(1009)[0] is not None
said["another allocator"] = recording.record(
    lambda: None, 1, allocator="GPU_0_bfc", in_use_bytes=0, pool_bytes=None,
    telling=True,
) is None
open("said.json", "w").write(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recording")
    job = jobs.make(folder, SCRIPT, "devices: {cpu: 1, memory: [100MiB]}\n")
    assert job.run() == 0, job.everything()
    found: dict[str, Any] = json.loads(Path(folder / "said.json").read_text())
    return found


def test_a_small_step_tells_what_a_large_one_asks_for(said: dict[str, Any]) -> None:
    # But for the buffers that products of matrices are packed into.
    assert said["predicted"] == pytest.approx(said["needed"], rel=0.05)
    # TensorFlow's own figure has what it wasted in it.
    assert said["needed"] <= 1.02 * said["peak"]
    assert said["peak"] <= 2 * said["needed"]
    assert said["least"] >= said["needed"]


def test_played_to_the_device_s_pool_it_has_the_peak_that_tensorflow_tells(
    said: dict[str, Any],
) -> None:
    assert said["replayed"] == pytest.approx(said["peak"], rel=0.005)
    replayed, peak = said["of the small one"]
    assert replayed == pytest.approx(peak, rel=0.005)


def test_a_profile_of_the_script_s_own_is_left_alone(said: dict[str, Any]) -> None:
    assert said["beside another"]
    assert said["their profile"]


def test_memory_that_runs_out_in_it_ends_the_recording(said: dict[str, Any]) -> None:
    assert said["exhausted"]
    assert said["after that"]


def test_another_allocator_s_pieces_are_not_counted(said: dict[str, Any]) -> None:
    assert said["another allocator"]
