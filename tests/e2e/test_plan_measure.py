"""``oomrun plan --measure``: what a run will need is known, and nothing was trained."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest

from oomrun.core import events as ev

# The batch does not fit; the callback would empty a file that is there already.
SCRIPT = """
import keras
import numpy as np

keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(16384, 16)).astype("float32")
y = rng.integers(0, 3, size=16384)
model = keras.Sequential([
    keras.Input((16,)),
    *(keras.layers.Dense(256, activation="relu") for _ in range(6)),
    keras.layers.Dense(3, activation="softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy")
kept = keras.callbacks.CSVLogger("kept.csv")
model.fit(x, y, batch_size=16384, epochs=2, verbose=2, callbacks=[kept])
open("trained", "w").close()
"""
LIMIT = "devices: {cpu: 1, memory: [96MiB]}\ncheckpoint: {dir: saved}\n"
BATCH = 16384
TRAINED_BYTES = 4 * (17 * 256 + 5 * 257 * 256 + 257 * 3)


def start(job: jobs.Job, *options: str, command: str = "plan") -> subprocess.Popen[str]:
    """Another command of oomrun on the job; what it leaves behind is in ``tmp``."""
    (job.folder / "tmp").mkdir(exist_ok=True)
    env = {
        "XDG_CACHE_HOME": str(job.folder / "cache"),
        "TMPDIR": str(job.folder / "tmp"),
    }
    return subprocess.Popen(
        [*jobs.OOMRUN, command, *options],
        cwd=job.folder,
        env=jobs.environment(env),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def plan(job: jobs.Job, *options: str, code: int = 0) -> tuple[str, str]:
    """What ``oomrun plan`` says on stdout and on stderr."""
    process = start(job, "job.yaml", *options)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    assert not list((job.folder / "tmp").iterdir()), "something was left behind"
    return out, err


def adds_up(made: dict[str, Any]) -> None:
    (device,), told = made["devices"], made["breakdown"]
    assert sum(told["parts"].values()) == device["predicted_peak_bytes"]
    assert (
        told["peak_bytes"] + told["margin_bytes"] + told["unused_bytes"]
        + told["headroom_bytes"]
    ) == device["limit_bytes"]  # fmt: skip
    assert told["parts"]["trained"] == told["parts"]["gradients"] == TRAINED_BYTES
    # Adam: two slots, its count of steps and its rate.
    assert 0 <= told["parts"]["optimizer"] - 2 * TRAINED_BYTES < 100
    assert told["parts"]["input"] == BATCH * (16 * 4 + 8)
    assert told["parts"]["activations"] > 0
    assert told["bytes_per_sample"] > 0


def test_what_is_planned_is_what_is_run(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, SCRIPT, LIMIT)
    (tmp_path / "kept.csv").write_text("kept\n")
    out, err = plan(job, "--measure", "--json")
    made = json.loads(out)
    (device,) = made["devices"]
    assert device["share"] == BATCH
    assert 1 < device["micro_batch_size"] < BATCH
    assert device["predicted_peak_bytes"] <= device["budget_bytes"]
    # TensorFlow may count more than is needed, and never more than there is.
    assert device["predicted_peak_high_bytes"] <= device["limit_bytes"]
    assert 1 <= len(made["tried"]) <= 3
    assert f"tried micro-batch {made['tried'][0]['micro_batch_size']} for 2" in err
    adds_up(made)
    # Nothing was trained, saved or called back.
    assert (tmp_path / "kept.csv").read_text() == "kept\n"
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"cache", "job.yaml", "kept.csv", "tmp", "train.py"}

    assert job.run() == 0, job.everything()
    assert not job.events(ev.Probed), "what was measured is not remembered"
    assert not job.events(ev.OomOccurred)
    (planned,) = job.events(ev.MicroBatchPlanned)
    assert planned.micro_batch_size == device["micro_batch_size"]
    assert planned.predicted_peak_bytes == device["predicted_peak_bytes"]

    # From its journal the run can be explained as well, and planned elsewhere.
    made = json.loads(plan(job, "--json")[0])
    adds_up(made)
    told = job.status()["breakdown"]
    assert told["parts"]["trained"] == TRAINED_BYTES
    out, _ = plan(job, "--device-memory", "24GiB", "--json")
    (device,) = json.loads(out)["devices"]
    assert (device["kind"], device["micro_batch_size"]) == ("gpu", BATCH)


def test_a_loop_of_the_script_s_own(tmp_path: Path) -> None:
    fit, after = SCRIPT.index("model.compile"), 'open("trained", "w").close()'
    loop = """import oomrun, tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16384)
entropy = keras.losses.SparseCategoricalCrossentropy()
loop = oomrun.Loop(
    lambda b: entropy(b[1], model(b[0])), keras.optimizers.Adam(), state=model
)
for epoch in loop.epochs(2):
    for batch in loop.batches(data):
        loop.step(batch)
"""
    job = jobs.make(tmp_path, SCRIPT[:fit] + loop + after, LIMIT)
    made = json.loads(plan(job, "--measure", "--json")[0])
    (device,) = made["devices"]
    assert 1 < device["micro_batch_size"] < BATCH
    assert 1 <= len(made["tried"]) <= 3
    adds_up(made)
    assert not (tmp_path / "trained").exists()


def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    job = jobs.make(tmp_path, SCRIPT, "devices: gpu\n")
    out, err = plan(job, "--measure", "--device-memory", "24GiB", "--json")
    assert "tried" not in err
    made = json.loads(out)
    (device,) = made["devices"]
    assert (device["kind"], device["micro_batch_size"]) == ("gpu", BATCH)
    # Wide, since nothing was run.
    likely, high = device["predicted_peak_bytes"], device["predicted_peak_high_bytes"]
    assert high > 1.5 * likely
    assert "from the graph of the step alone" in made["notes"][-1]
    adds_up(made)
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("print('so far')\nraise ValueError('no data')\n", 1, "train.py:2: no data"),
        ("import keras, numpy as np\nmodel = keras.Sequential([keras.layers.Dense(1)])"
         "\nmodel.compile('sgd', 'mse')\nones = np.ones((4, 2))\n"
         "model.train_on_batch(ones, ones[:, 0])\nopen('trained', 'w')\n", 0,
         "train_on_batch is called"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_measured(
    script: str, code: int, told: str, tmp_path: Path
) -> None:
    job = jobs.make(tmp_path, script, LIMIT)
    out, err = plan(job, "--measure", code=code)
    assert told in out + err
    assert ("  | so far\n" in err) == (code == 1)
    assert not (tmp_path / "trained").exists()
    assert not job.run_dir.path.exists()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    waits = "import os, time\nopen('pid', 'w').write(f'{os.getpid()}\\n')\n"
    job = jobs.make(tmp_path, waits + "time.sleep(300)\n", LIMIT)
    process = start(job, "job.yaml", "--measure")
    try:
        until, pid = time.monotonic() + 120, tmp_path / "pid"
        while not (pid.exists() and pid.read_text().endswith("\n")):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped; nothing was trained or saved" in err
    assert not psutil.pid_exists(int(pid.read_text()))
    assert not list((tmp_path / "tmp").iterdir())
