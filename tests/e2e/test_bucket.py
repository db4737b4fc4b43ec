"""Checkpoints in a bucket: TensorFlow's own ``gs://`` client, real processes.

The bucket is a server on this machine; everything else is as with Google's.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

import gcs_server
from oomrun.core import events as ev

SMALL = """\
import keras
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype("float32")
y = x[:, :1] * 0.5
model = keras.Sequential([
    keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1),
])
model.compile("adam", "mse")

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import time
        time.sleep(SLEEP)

# Neither the order of the samples nor the first weights have a seed of the script's.
model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=[Slow()])
np.savez("weights.npz", *model.get_weights())
"""
JOB = """\
devices: {cpu: 1, memory: 200MiB}
memory: {probe: never}
checkpoint: {dir: "gs://bucket/{name}", every: 8 steps, keep: 2}
"""


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[gcs_server.Bucket]:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed (apt-get install openssl)")
    with gcs_server.serve(tmp_path / "server") as found:
        yield found


def test_a_run_goes_on_on_another_machine(
    bucket: gcs_server.Bucket, tmp_path: Path
) -> None:
    env = bucket.environment
    job = jobs.make(tmp_path / "job", SMALL.replace("SLEEP", "0.02"), JOB)
    process = job.start(env=env)
    job.wait_for(ev.CheckpointSaved, lambda saved: saved.step >= 40)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, job.everything()
    (began,) = job.events(ev.RunStarted)
    last = job.events(ev.CheckpointSaved)[-1]
    # The one that was written last is there, too, and no more than are kept. Those in
    # between may have come faster than they could be copied.
    steps = bucket.names("step")
    assert steps[-1] == last.name
    assert len(steps) <= 2
    # A pod without a volume finds nothing of it on its disk.
    shutil.rmtree(job.run_dir.path)
    assert job.run(env=env) == 0, job.everything()
    (again,) = job.events(ev.RunStarted)
    assert (again.run_id, again.seed) == (began.run_id, began.seed)
    (fetched,) = job.events(ev.CheckpointsFetched)
    assert fetched.names == (last.name,)
    (restored,) = job.events(ev.Restored)
    assert restored.step == last.step
    # The samples of the epoch that was begun come in its own order.
    assert not [n for n in job.events(ev.Noted) if n.code == "data-not-repeated"]
    assert job.status()["step"] == 128
    assert bucket.names("fit") == ["fit-0001"]
    assert job.status()["mirror"]["name"] == "fit-0001"


@pytest.mark.slow
def test_a_bucket_that_refuses_ends_no_training(
    bucket: gcs_server.Bucket, tmp_path: Path
) -> None:
    bucket.refused = True
    job = jobs.make(tmp_path / "job", SMALL.replace("SLEEP", "0"), JOB)
    assert job.run(env=bucket.environment) == 0, job.everything()
    assert not bucket.names("step")
    failed = job.events(ev.MirrorFailed)
    assert failed
    assert all("PermissionDenied" in event.reason for event in failed)
    assert "training goes on with the local disk alone" in job.said()
    assert job.status()["mirror"]["failures"] == len(failed)
    # Where there is no run, nobody can say whether one is to go on from there.
    elsewhere = jobs.make(tmp_path / "elsewhere", SMALL.replace("SLEEP", "0"), JOB)
    unreachable = {**bucket.environment, "https_proxy": "http://127.0.0.1:1"}
    unreachable["GCS_RETRY_CONFIG_MAX_RETRIES"] = "1"
    assert elsewhere.run(env=unreachable) == 4
    assert "--fresh trains from the start" in elsewhere.said()
    assert not elsewhere.run_dir.journal.exists() or not elsewhere.events(ev.RunStarted)
