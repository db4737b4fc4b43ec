"""The main job as a newcomer runs it, with the real command."""

from __future__ import annotations

from pathlib import Path

import jobs

from oomrun.core import events as ev

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
EPOCHS = 2


def test_the_quickstart_ends_with_the_weights_of_the_script_alone(
    tmp_path: Path,
) -> None:
    alone, under = tmp_path / "alone.npz", tmp_path / "under.npz"
    env = {"FLOATX": "float64"}
    jobs.python(
        QUICKSTART / "train.py", "--epochs", str(EPOCHS), "--output", str(alone),
        cwd=tmp_path, env=env,
    )  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    # The job file as it is, from another folder: only the run is shorter.
    job = jobs.Job(folder)
    (folder / "job.yaml").symlink_to(QUICKSTART / "job.yaml")
    arguments = f"args=[--epochs, {EPOCHS}, --output, {under}]"
    code = job.run(
        "--set", f"script={QUICKSTART / 'train.py'}", "--set", arguments,
        "--set", "metrics.listen=127.0.0.1:0", "--run-dir", f"runs/{jobs.NAME}",
        env=env,
    )  # fmt: skip
    assert code == 0, job.everything()
    status = job.status()
    assert status["state"] == "completed"
    assert status["exit_code"] == 0
    # The whole batch does not fit; that was known before it was tried.
    assert status["oom_events"] == 0
    tried = job.events(ev.Probed)
    assert 1 <= len(tried) <= 3
    assert all(t.micro_batch_size < 256 for t in tried)
    assert (status["attempts"], status["restarts"]["oom"]) == (1, 0)
    assert status["global_batch_size"] == 256
    assert status["devices"][0]["micro_batch_size"] < 256
    assert (status["epoch"], status["step"]) == (EPOCHS, 6 * EPOCHS)
    assert status["samples"] == 1536 * EPOCHS
    assert jobs.distance(under, alone) <= 1e-10
    (planned,) = job.events(ev.MicroBatchPlanned)
    (device,) = status["devices"]
    assert planned.micro_batch_size == device["micro_batch_size"]
    assert device["peak_bytes"] <= device["limit_bytes"]
    assert jobs.gone(job)
