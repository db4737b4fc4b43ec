"""Running out of memory in steps that XLA compiles, and in steps run eagerly."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from oomrun.core import events as ev

SCRIPT = """
import keras
import numpy as np
keras.utils.set_random_seed(3)
keras.backend.set_floatx("float64")
x = np.random.default_rng(0).normal(size=(8192, 32))
dense = keras.layers.Dense
hidden = [dense(512, activation="tanh") for _ in range(3)]
model = keras.Sequential([keras.Input((32,)), *hidden, dense(3)])
model.compile("adam", "mse", metrics=["mae"], {MODE}=True)
history = model.fit(x, x[:, :3], batch_size=4096, epochs=2, verbose=2)
np.savez("weights.npz", *model.get_weights(), *history.history.values())
"""


@pytest.mark.parametrize(
    ("mode", "recovery"),
    # XLA may have written anything to the weights where it failed: only a new process
    # knows them again.
    [
        ("jit_compile", "restart"),
        pytest.param("run_eagerly", "in_process", marks=pytest.mark.slow),
    ],
)
def test_weights_are_right_after_running_out(
    mode: str, recovery: str, tmp_path: Path
) -> None:
    device = "devices: {cpu: 1, memory: [60MiB]}\nmemory: {probe: never}\n"
    job = jobs.make(tmp_path / "job", SCRIPT.replace("{MODE}", mode), device)
    assert job.run() == 0, job.everything()
    oom = job.events(ev.OomOccurred)[0]
    assert (oom.micro_batch_size, oom.recovery) == (4096, recovery)
    assert job.events(ev.Progressed)[-1].micro_batch_size < 4096
    jobs.python(job.folder / "train.py", cwd=tmp_path)
    found, wanted = job.folder / "weights.npz", tmp_path / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10


def test_what_xla_compiles_is_tried_in_parts(tmp_path: Path) -> None:
    device = "devices: {cpu: 1, memory: [60MiB]}\n"
    job = jobs.make(tmp_path, SCRIPT.replace("{MODE}", "jit_compile"), device)
    assert job.run() == 0, job.everything()
    assert not job.events(ev.OomOccurred), job.said()
    tried = [event.micro_batch_size for event in job.events(ev.Probed)]
    assert 1 <= len(tried) <= 2
    # Where a whole batch by XLA ran out of memory, nothing could be put back.
    assert all(size < 4096 for size in tried)
    (planned,) = job.events(ev.MicroBatchPlanned)
    assert planned.predicted_peak_bytes is not None
    assert planned.micro_batch_size in tried
