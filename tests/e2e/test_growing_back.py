"""A neighbour within the process takes memory for an epoch, and gives it back."""

from __future__ import annotations

from pathlib import Path

import jobs
import wide_model

from oomrun.core import events as ev

# A step over 96 samples takes about 58 MiB. The neighbour leaves 45 MiB in the second
# epoch.
SCRIPT = (
    wide_model.START
    + """\
class Neighbour(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.taken = None
        if epoch == 1 and "OOMRUN_RANK" in os.environ:
            self.taken = fill(105 * 2**20)
model.fit(x, y, batch_size=96, epochs=4, verbose=0, callbacks=[Neighbour()])
np.savez("weights.npz", *model.get_weights())
"""
)


def test_the_micro_batch_comes_back_with_its_memory(tmp_path: Path) -> None:
    more = "devices: {cpu: 1, memory: 150MiB}\ncheckpoint: {every: 2 steps}\n"
    job = jobs.make(tmp_path, SCRIPT, more)
    assert job.run() == 0, job.everything()
    *shrunk, grown = job.events(ev.MicroBatchChanged)
    assert shrunk, job.everything()
    assert all(e.new < e.old for e in shrunk)
    assert (grown.old, grown.new) == (shrunk[-1].new, shrunk[0].old)
    assert len(job.events(ev.AttemptStarted)) == 1
    status = job.status()
    assert status["in_process_recoveries"] == len(shrunk)
    assert status["devices"][0]["micro_batch_size"] == grown.new
    (plain := tmp_path / "plain").mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    found, wanted = tmp_path / "weights.npz", plain / "weights.npz"
    assert jobs.distance(found, wanted) <= 1e-10, job.everything()
