"""Checkpoints on disks that are full, read-only, slow or damaged: training goes on.

The writer is the worker's own, with a real model and real files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from oomrun import checkpoints
from oomrun.core.errors import CheckpointError
from oomrun.worker import checkpointing


class Told:
    """What a writer says of its checkpoints."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.failed: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def on_saved(self, name: str, *_: Any) -> None:
        self.go_on.wait(60)
        self.saved.append(name)

    def on_failed(self, reason: str, _: Any) -> None:
        self.failed.append(reason)

    def writer(self, folder: Path, timeout_s: float = 60.0) -> checkpointing.Writer:
        return checkpointing.Writer(
            folder, 3, self.on_saved, self.on_failed, timeout_s=timeout_s
        )


@pytest.fixture(scope="module")
def model() -> Any:
    made = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32)])
    made.compile("adam", "mse")
    made.train_on_batch(np.zeros((2, 32)), np.zeros((2, 32)))
    return made


def save(writer: checkpointing.Writer, model: Any, step: int) -> None:
    writer.save(name(step), model, {"fit": 1, "step": step}, None)


def name(step: int) -> str:
    return f"step-{step:010d}-0001"


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_spares_the_last_good_one_and_the_next(
    tmp_path: Path, model: Any
) -> None:
    told = Told()
    writer = told.writer(tmp_path)
    save(writer, model, 1)
    writer.wait()
    with small_files(1024):
        save(writer, model, 2)
        writer.wait()
    assert told.saved == [name(1)]
    (reason,) = told.failed
    assert "File too large" in reason
    assert name(2) in reason
    assert checkpointing.load(tmp_path / name(1))[0]["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [name(1)]
    save(writer, model, 3)
    writer.wait()
    assert told.saved == [name(1), name(3)]


def test_a_folder_that_is_none_any_more(tmp_path: Path, model: Any) -> None:
    told = Told()
    folder = tmp_path / "checkpoints"
    writer = told.writer(folder)
    save(writer, model, 1)
    writer.wait()
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was: nothing can be written")
    save(writer, model, 2)
    writer.wait()
    assert len(told.failed) == 1
    folder.unlink()
    save(writer, model, 3)
    writer.wait()
    assert told.saved == [name(1), name(3)]


def test_a_folder_in_which_nothing_can_be_made(model: Any) -> None:
    told = Told()
    # Root may write into a folder that is read-only, but nobody can here.
    writer = told.writer(Path("/proc/self/checkpoints"))
    save(writer, model, 1)
    writer.wait()
    assert told.saved == []
    assert "/proc/self/checkpoints" in told.failed[0]


def test_what_takes_too_long_is_given_up(tmp_path: Path, model: Any) -> None:
    told = Told()
    writer = told.writer(tmp_path, timeout_s=0.0)
    save(writer, model, 1)
    writer.wait()
    assert told.saved == []
    assert "took longer than 0s" in told.failed[0]
    assert list(tmp_path.iterdir()) == []


def test_training_does_not_wait_for_one_that_hangs(tmp_path: Path, model: Any) -> None:
    told = Told()
    writer = told.writer(tmp_path, timeout_s=0.2)
    told.go_on.clear()  # it is written, and its thread hangs
    save(writer, model, 1)
    try:
        save(writer, model, 2)
        assert told.saved == []
        assert "still being written after 200ms" in told.failed[0]
    finally:
        told.go_on.set()
    assert writer.wait()
    save(writer, model, 3)
    assert writer.wait()
    assert told.saved == [name(1), name(3)]


FILES = ("MANIFEST.json", "arrays.bin", "state.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """A checkpoint of the model."""
    folder = tmp_path_factory.mktemp("whole")
    writer = Told().writer(folder)
    save(writer, model, 1)
    writer.wait()
    assert sorted(p.name for p in (folder / name(1)).iterdir()) == sorted(FILES)
    return folder / name(1)


def _truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def _flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int((len(content) - 1) * share)] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("damage", [_truncate, _flip])
def test_a_damaged_file_is_never_loaded(
    tmp_path: Path, whole: Path, file: str, share: float, damage: Any
) -> None:
    copy = tmp_path / whole.name
    shutil.copytree(whole, copy)
    damage(copy / file, share)
    with pytest.raises(CheckpointError, match=whole.name):
        checkpointing.load(copy)


@pytest.mark.parametrize("file", FILES)
def test_a_deleted_file_is_missed(tmp_path: Path, whole: Path, file: str) -> None:
    copy = tmp_path / whole.name
    shutil.copytree(whole, copy)
    (copy / file).unlink()
    with pytest.raises(CheckpointError, match=whole.name):
        checkpointing.load(copy)
    assert checkpoints.names(tmp_path, "step") in ([whole.name], [])


# In a process of its own, whose host memory runs out while a checkpoint is copied.
NO_MEMORY = """
import os, resource, sys
from pathlib import Path
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import keras
from oomrun.worker import checkpointing

model = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(4096)])  # 64 MiB
model.compile("sgd", "mse")
told = []
writer = checkpointing.Writer(
    Path(sys.argv[1]), 3,
    lambda name, *_: told.append(name), lambda why, _: told.append(why),
)
def save(step):
    writer.save(f"step-{step}", model, {"fit": 1, "step": step}, None)
    writer.wait()
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
def limit():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**24, hard))
limit()
save(1)
resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
save(2)
limit()
save(3)  # into the memory of the one before
resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
print(told)
"""


def test_memory_that_runs_out_in_a_checkpoint_does_not_end_training(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, str(tmp_path)],
        text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    why = "memory ran out while everything was copied"
    assert done.stdout.strip().endswith(str([why, "step-2", "step-3"]))
