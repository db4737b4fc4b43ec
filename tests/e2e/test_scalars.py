"""What TensorBoard shows of a run that ran out of memory and was killed once."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from test_recovery import IMAGES, LIMITED

from oomrun.core import events as ev

SCRIPT = (
    IMAGES
    + """\
import pathlib, signal

class Killed(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        flag = pathlib.Path("killed")
        if self.epoch == 1 and batch == 2 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

model.fit(x, y, batch_size=256, epochs=2, verbose=2,
          callbacks=[Hog(), keras.callbacks.TensorBoard("logs"), Killed()])
"""
)
CHECKPOINTS = "checkpoint: {every: 2 steps}\n"


@pytest.mark.slow
def test_tensorboard_has_a_run_of_ours_beside_the_script_s(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    job = jobs.make(tmp_path / "job", SCRIPT, LIMITED + CHECKPOINTS)
    assert job.run(env={"HOG": "115"}) == 0, job.everything()
    folder = job.folder / "logs"
    assert {path.name for path in folder.iterdir()} == {"train", "oomrun"}
    seen = reader.EventAccumulator(str(folder / "oomrun"))
    seen.Reload()

    def points(tag: str) -> dict[int, float]:
        return {one.step: one.value for one in seen.Scalars(tag)}

    progress = job.events(ev.Progressed)
    sizes = points("batch/micro_batch_size")
    assert sizes[8] == progress[-1].micro_batch_size == 128
    # What was lost and trained again is there once.
    steps = [one.step for one in seen.Scalars("batch/micro_batch_size")]
    assert steps == sorted(set(steps))
    limit = points("memory/limit_bytes")
    assert set(limit.values()) == {240 * 2**20}
    assert max(points("memory/peak_bytes").values()) <= 240 * 2**20
    assert points("step/seconds")[8] > 0
    (oom,) = job.events(ev.OomOccurred)
    assert points("events/out_of_memory") == {oom.step: 1}
    (restored,) = job.events(ev.Restored)
    assert points("events/restored") == {restored.step: 1}
    assert points("events/attempt")[restored.step] == 2
    (text,) = seen.Tensors("events/out_of_memory/text")
    (words,) = text.tensor_proto.string_val
    assert words.decode().startswith("device memory ran out in gradients on cpu:0: ")
