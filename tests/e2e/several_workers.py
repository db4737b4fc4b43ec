"""What tests of several workers share: the beginning of scripts, faults, checks.

Covers: helpers without checks of their own. Does not cover: the model that takes memory
(``wide_model``), processes that stand in for workers (``killable``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jobs

from oomrun.core import events as ev

BY_HOROVOD = "horovod"
BY_TENSORFLOW = "multi_worker_mirrored"
EACH = [BY_HOROVOD, BY_TENSORFLOW]

#: The beginning of a script. 250 samples are batches of 96, 96 and 58, which is no
#: multiple of anything. ``slow`` makes a step take as long as the environment says.
START = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 24))
y = np.sin(x @ random.normal(size=(24, 1)))
rank = os.environ.get("OOMRUN_RANK", "0")
def wait(*_, logs=None):
    time.sleep(float(os.environ.get("SLOW", "0")))
slow = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
"""
#: A layer for inputs of 24 features; the gradient of its table is sparse.
PLACES = """
class Places(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(30, 1))
    def call(self, x):
        return x + tf.gather(self.table, tf.range(24))[:, 0]
"""


def alone(folder: Path, script: str, *args: str, name: str = "weights-0.npz") -> Path:
    """What the script saves where plain Keras runs it, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    jobs.python(folder / "train.py", *args, cwd=folder)
    return folder / name


def with_a_signal_to_the_second(run: jobs.Job, number: int, slow: str) -> None:
    """The run to its end; after the first checkpoint the second worker is sent it."""
    process = run.start(env={"SLOW": slow})
    try:
        run.wait_for(ev.CheckpointSaved)
        _, second = run.events(ev.AttemptStarted)[0].pids
        os.kill(second, number)
        assert process.wait(400) == 0, run.everything()
    finally:
        process.kill()
        process.wait()


def with_the_second_killed(run: jobs.Job, slow: str) -> ev.AttemptEnded:
    """The run to its end, in two attempts; how the first ended."""
    with_a_signal_to_the_second(run, signal.SIGKILL, slow)
    assert len(run.events(ev.AttemptStarted)) == 2
    (ended, _) = run.events(ev.AttemptEnded)
    assert jobs.gone(run)
    return ended


def trained_as_one(run: jobs.Job, plain: Path, workers: int) -> None:
    """All workers have the same to the last bit, and what plain Keras comes to."""
    weights = [run.folder / f"weights-{rank}.npz" for rank in range(workers)]
    for other in weights[1:]:
        assert jobs.identical(weights[0], other)
    assert jobs.distance(weights[0], plain) < 1e-10, run.everything()


def shares(run: jobs.Job, device: str) -> list[tuple[int, int]]:
    """The share of a device and the size of its passes, each time they were planned."""
    planned = run.events(ev.SharePlanned)
    return [(s.share, s.micro_batch_size) for s in planned if s.device == device]


def only_the_second_ran_out(run: jobs.Job) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of two workers, in process; it got smaller passes of the same share.

    Returns:
        The share and the size of passes of each worker as they were at first.
    """
    # How many depends on how the pieces lie.
    ooms = {(o.rank, o.device, o.recovery) for o in run.events(ev.OomOccurred)}
    assert ooms == {(1, "cpu:1", "in_process")}, run.everything()
    assert len(run.events(ev.AttemptStarted)) == 1
    (first,) = shares(run, "cpu:0")
    second, *_, last = shares(run, "cpu:1")
    assert first[0] + second[0] == 96
    assert last[0] == second[0]
    assert last[1] <= second[1] // 2
    return first, second
