"""Scripts that stand in the way: they catch everything, or end without a word.

Whatever a script does, a run that was stopped is stopped, and not called complete.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

CATCHES = """
import os, sys, time
import keras, numpy as np
keras.utils.set_random_seed(1)
keras.backend.set_floatx("float64")
x = np.random.default_rng(0).random((64, 8))
layers = [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("adam", "mse", steps_per_execution=int(os.environ.get("TOGETHER", 1)))
slow = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: time.sleep(float(os.environ.get("SLOW", 0)))
)
try:
    model.fit(x, x.sum(1), batch_size=8, epochs=4, verbose=0, callbacks=[slow])
    done = True
except:
    done = False
finally:
    if os.environ.get("LEAVE"):
        np.savez("left.npz", done)
        sys.exit(0)
np.savez("weights.npz", *[w.numpy() for w in model.weights])
"""

ENDS = """
import os
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
os._exit(0)
"""

SENDS = """
import atexit, threading, time
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones(8), verbose=0)

def send(name):
    time.sleep(4)
    open(name, "w").close()

atexit.register(send, "handler")
threading.Thread(target=send, args=("thread",)).start()
"""


@pytest.mark.parametrize(
    "env",
    [
        {"LEAVE": "1"},
        {"TOGETHER": "3"},
        # The others' own is all that is special in them.
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_catches_everything_is_stopped_and_resumed(
    tmp_path: Path, env: dict[str, str]
) -> None:
    job = jobs.make(tmp_path, CATCHES, "checkpoint: {every: 100 steps}\n")
    process = job.start(env={**env, "SLOW": "0.2"})
    job.wait_for(ev.Progressed, lambda event: event.step >= 2)
    process.terminate()
    assert process.wait(60) == 75, job.everything()
    assert job.status()["state"] == "preempted"
    assert not list(tmp_path.glob("*.npz")), "the script went on after it was stopped"
    assert job.run(env=env) == 0, job.everything()
    assert job.status()["samples"] == 4 * 64
    if "LEAVE" not in env:
        (tmp_path / "plain").mkdir()
        jobs.python(tmp_path / "train.py", cwd=tmp_path / "plain", env=env)
        plain = tmp_path / "plain" / "weights.npz"
        assert jobs.identical(tmp_path / "weights.npz", plain)


def test_a_script_that_ends_without_a_word_is_not_tried_forever(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, ENDS, "")
    assert job.run() == 1, job.everything()
    assert job.status()["attempts"] == 2
    assert "os._exit" in job.status()["last_decision"]


WANTS_MORE = """
import keras, numpy as np, tensorflow as tf
def batches():
    for _ in range(4):
        yield np.ones((8, 2)), np.ones(8)
    np.ones(2**46)
spec = tf.TensorSpec((8, 2), tf.float64), tf.TensorSpec((8,), tf.float64)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = tf.data.Dataset.from_generator(batches, output_signature=spec)
model.fit(data, epochs=2, verbose=0)
"""


def test_what_a_script_sends_away_at_its_end_is_waited_for(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, SENDS, "")
    assert job.run() == 0, job.everything()
    assert (tmp_path / "thread").exists()
    assert (tmp_path / "handler").exists()
    assert "threads or exit handlers are still at work" in job.said()
    (end,) = job.events(ev.AttemptEnded)
    assert end.summary == "the script finished"


def test_host_memory_that_a_generator_lacks_is_no_matter_of_the_batch(
    tmp_path: Path,
) -> None:
    job = jobs.make(tmp_path, WANTS_MORE, "devices: {cpu: 1, memory: 300MiB}\n")
    assert job.run() == 1, job.everything()
    (oom,) = job.events(ev.OomOccurred)
    assert (oom.kind, oom.device, oom.micro_batch_size) == ("host", "host", None)
    assert job.status()["attempts"] == 1
    assert "load less data at once" in job.said()
