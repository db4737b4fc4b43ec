"""Causes without a cell in the fault matrix, each by a real failure of a real script.

Covers: what the run says of each, and that the policy does what belongs to it. Does not
cover: texts of others' logs (``tests/unit/test_judging.py``), faults of GPU libraries,
which need a GPU.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import disks
import jobs
import pytest

from oomrun.core import events as ev

JOB = """\
devices: {cpu: 1, memory: 120MiB}
memory: {probe: never}
recovery: {max_restarts: {crash: 1}}
"""

# A pool that had room for a step until another user of the device took the room in many
# small parts, and gave back every second one: half of it is free, and none of it is
# large.
FRAGMENTS = """
import os
import keras, numpy as np, tensorflow as tf
keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)

class Wide(keras.layers.Layer):
    def call(self, inputs):
        # A MiB a sample, in one piece.
        wide = tf.repeat(inputs, 2**13, axis=1)
        return tf.reduce_mean(tf.reshape(wide, (-1, 2**13, 16)), axis=1)

class Neighbour(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and not os.path.exists("in-fragments"):
            open("in-fragments", "w").close()
            parts = []
            try:
                while True:
                    parts.append(tf.fill([2**17], tf.constant(0.5, "float64")))
            except tf.errors.ResourceExhaustedError:
                self.kept = parts[::2]

rng = np.random.default_rng(0)
model = keras.Sequential([keras.Input((16,)), Wide(), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(
    rng.normal(size=(96, 16)), rng.normal(size=(96, 1)), batch_size=16, verbose=2,
    shuffle=False, callbacks=[Neighbour()] if os.environ.get("FRAGMENTS") else [],
)
np.savez("weights.npz", *model.get_weights())
"""


@pytest.mark.slow
def test_fragments_are_no_room(tmp_path: Path) -> None:
    job = jobs.make(tmp_path / "job", FRAGMENTS, JOB)
    assert job.run(env={"FRAGMENTS": "yes"}) == 0, job.everything()
    oom = job.events(ev.OomOccurred)[0]
    assert (oom.kind, oom.step) == ("device", 3)
    # There is no room either to find out whether two rows are as one of each.
    assert "again, in a new process" in job.said()
    assert sum(event.lost_steps for event in job.events(ev.Restored)) == 0
    (memory,) = oom.memory
    assert memory.limit_bytes is not None
    assert memory.in_use_bytes is not None
    # More was free than the largest tensor of a step takes.
    assert memory.limit_bytes - memory.in_use_bytes > 2 * 16 * 2**20
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10


AT_START = """
import tensorflow as tf
print(tf.reduce_max(tf.fill([2**26], 0.5)))
"""


@pytest.mark.slow
def test_memory_runs_out_before_the_first_batch(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, AT_START, JOB)
    assert job.run() == 3, job.everything()
    assert "device memory ran out outside fit, at train.py:3" in job.said()
    assert "what the script puts on the device, is larger than the limit" in job.said()
    assert _cause(job) == "device_oom"


BAD_ALLOC = """
import ctypes
ctypes.CDLL("./greedy.so").want()
"""
GREEDY = """
#include <new>
extern "C" void want() { volatile char *most = new char[1ULL << 60]; most[0] = 1; }
"""


@pytest.mark.slow
def test_a_library_throws_bad_alloc(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, BAD_ALLOC, JOB)
    (tmp_path / "greedy.cc").write_text(GREEDY)
    words = ["c++", "-shared", "-fPIC", "-o", "greedy.so", "greedy.cc"]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert job.run() == 1, job.everything()
    assert "host memory ran out: SIGABRT after" in job.said()
    assert _cause(job) == "host_oom"
    assert job.status()["attempts"] == 1


SHARED = """
import mmap
with open("/dev/shm/samples", "w+b") as file:
    file.truncate(2**22)
    mmap.mmap(file.fileno(), 2**22).write(bytes(2**22))
"""
SHARED_FILE = """
with open("/dev/shm/samples", "wb") as file:
    file.write(bytes(2**22))
"""
ON_DISK = """
with open("saved/samples", "wb") as file:
    file.write(bytes(2**22))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "folder", "cause", "said"),
    [
        (SHARED, "/dev/shm", "shm_full", "(/dev/shm) is full: SIGBUS"),
        (SHARED_FILE, "/dev/shm", "shm_full", "(/dev/shm) is full (OSError"),
        (ON_DISK, "saved", "disk_full", "the disk is full, or a quota is used up"),
    ],
    ids=["mapped", "shared-file", "disk"],
)
def test_a_disk_that_the_script_fills(
    tmp_path: Path, script: str, folder: str, cause: str, said: str
) -> None:
    job = jobs.make(tmp_path, script, JOB)
    with disks.disk(tmp_path / folder, "1m") as disk:
        assert job.start(inside=disk.inside(tmp_path)).wait(300) == 1
    assert said in job.said()
    assert _cause(job) == cause


LARGE_GRAPH = """
import numpy as np, tensorflow as tf
large = np.zeros(2**31, dtype="uint8")
tf.function(lambda: tf.reduce_max(tf.constant(large)))()
"""
LARGE_MESSAGE = """
from concurrent import futures
import grpc

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda *_: bytes(5 * 2**20))

server = grpc.server(futures.ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((Handler(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b")(b"")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "cause", "said"),
    [
        (LARGE_GRAPH, "graph_limit", "above the limit of protobuf (2 GB)"),
        (LARGE_MESSAGE, "message_limit", "a message is above gRPC's limit"),
    ],
    ids=["graph", "message"],
)
def test_a_limit_that_is_no_memory(
    tmp_path: Path, script: str, cause: str, said: str
) -> None:
    job = jobs.make(tmp_path, script, JOB)
    assert job.run() == 1, job.everything()
    assert said in job.said()
    assert _cause(job) == cause
    # It would happen again.
    assert job.status()["attempts"] == 1


def _cause(job: jobs.Job) -> str:
    return job.events(ev.AttemptEnded)[-1].cause
