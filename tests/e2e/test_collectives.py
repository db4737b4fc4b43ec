"""What workers do together by TensorFlow's collectives, in processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import jobs

from oomrun.core.launch import RANK
from oomrun.ranks import Rendezvous

# Of each rank's own values all that is told must be the same; the last line says so.
WORKER = """
import os, sys
import numpy as np, tensorflow as tf
from oomrun_strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
os.environ["TF_GRPC_REUSE_PORT"] = "own"
group = MultiWorkerMirroredStrategy().group()
assert os.environ["TF_GRPC_REUSE_PORT"] == "own"
rank, size = group.rank, group.size
assert size == 3

def same(found, wanted):
    found = np.asarray(found)
    assert found.dtype == np.asarray(wanted).dtype, (found, wanted)
    assert found.shape == np.shape(wanted), (found, wanted)
    assert found.tobytes() == np.asarray(wanted).tobytes(), (found, wanted)

# Small and large, of several types, with none at all and a scalar among them.
types = ["float32", "float64", "bfloat16", "int32", "int64", "uint8", "uint32"]
given = [tf.cast(tf.fill([2, 3], rank + 1), name) for name in types]
given += [tf.ones([300, 300]), tf.zeros([0, 4]), tf.constant(2.5 * rank)]
for total, one in zip(group.sums(given, "a")[:7], given):
    same(total, tf.cast(tf.fill([2, 3], 6), one.dtype))
large, none, scalar = group.sums(given, "a")[7:]
same(large, tf.fill([300, 300], 3.0))
same(none, given[-2])
same(scalar, np.float32(7.5))

# Each traces when it likes, and for other shapes; one has made a step more by itself.
@tf.function(reduce_retracing=True)
def step(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 1e6)]):
        return group.sums([tf.reduce_sum(x), 2 * tf.reduce_sum(x)], "b")[1]
if rank == 1:
    step.get_concrete_function(tf.TensorSpec([None]))
for turn in range(40):
    if rank == 2 and turn % 10 == 0:  # before the sum: nobody else hears of it
        try:
            step(tf.constant([1e7]))
        except tf.errors.InvalidArgumentError:
            pass
    same(step(tf.constant([turn + rank], tf.float32)), np.float32(6 * turn + 6))

# Rows: more of one, none of others, and by other numbers each time.
@tf.function(reduce_retracing=True)
def rows(x):
    return group.joined(x, "c")
for turn in range(12):
    counts = [turn * turn if r == turn % 3 else (turn * r) % 5 for r in range(size)]
    own = np.full([counts[rank], 2], 10 * turn + rank, "int64")
    wanted = [np.full([n, 2], 10 * turn + r, "int64") for r, n in enumerate(counts)]
    same(rows(tf.constant(own)), np.concatenate(wanted))
same(group.joined(tf.constant([[0.5 + rank]], tf.float64), "d"), [[0.5], [1.5], [2.5]])
same(group.joined(tf.zeros([0, 3]), "e"), np.zeros([0, 3], "float32"))

# Whatever rank 0 has, to the bit.
first = [-0.0, float("nan"), 3.0]
of_first = [np.float32(first), np.bool_([[True], [False]]), np.uint32(2**32 - 1),
            np.uint64(2**64 - 1), np.float16(0.1), np.zeros([600, 200])]
variables = [tf.Variable(v if rank == 0 else np.ones_like(v)) for v in of_first]
for turn in range(2):
    group.take_from_first(variables, "f")
    for variable, value in zip(variables, of_first):
        same(variable, value)

# What no pass has written stays as it was: a third of it, three times, need not be it.
from types import SimpleNamespace
from oomrun.worker.engine import together
fixed = np.float32([0.1, float("inf"), 1 / 3, 0.7])
layer, metric = tf.Variable(fixed), tf.Variable([1.0, 10.0])
others = [SimpleNamespace(value=layer, assign=layer.assign)]
metrics = [SimpleNamespace(value=metric, assign=metric.assign)]
@tf.function
def passes(change):
    before, others_before = [tf.identity(metric)], [tf.identity(layer)]
    with tf.control_dependencies([*before, *others_before]):
        written = [metric.assign_add([1.0, 0.0]), layer.assign_add(change)]
    with tf.control_dependencies(written):
        third = tf.constant(1 / 3, tf.float64)
        together.join_state(group, metrics, before, others, others_before, third)
for turn in range(50):
    passes(tf.zeros([4]))
same(layer, fixed)
same(metric, np.float32([151.0, 10.0]))
# And what some have written is the mean.
passes(tf.constant([3.0 * rank, 0.0, 0.0, 0.0]))
assert abs(float(layer[0]) - 3.1) < 1e-6

Exhausted = tf.errors.ResourceExhaustedError
assert group.lost(Exhausted(None, None, "Additional GRPC error information from ..."))
assert not group.lost(Exhausted(None, None, "OOM when allocating tensor with shape"))
print("all the same")
"""


def ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def test_three_workers_have_the_same(tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(3)]
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(contextlib.closing(Rendezvous()))
        started: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(logs):
            told = meeting.environment("multi_worker_mirrored", rank, len(logs))
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env=jobs.environment({**told, RANK: str(rank)}),
                cwd=tmp_path,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        until = time.monotonic() + 240
        # Where one has failed the others wait for it.
        while not all(map(ended, started)) and not any(p.poll() for p in started):
            assert time.monotonic() < until, said(logs)
            time.sleep(0.05)
        assert [process.poll() for process in started] == [0, 0, 0], said(logs)
    assert all(log.read_text().endswith("all the same\n") for log in logs)


def said(logs: list[Path]) -> str:
    return "\n---\n".join(log.read_text()[-3000:] for log in logs)
