"""Which checkpoint a fit goes on from, on file systems that fail for a while."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oomrun import checkpoints
from oomrun.core import events as ev
from oomrun.core.errors import UnreadableError
from oomrun.worker import checkpointing
from oomrun.worker.encoding import encode
from oomrun.worker.store import Store

STEPS = (1, 2, 3)


def name(step: int) -> str:
    return f"step-{step:010d}-0001"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints as a worker writes them."""
    for step in STEPS:
        state = {"fit": 1, "run": "r", "fingerprint": {}, "step": step}
        files = checkpointing._pack(
            encode(state, {}, "state"), {"variable/0": np.ones(9, "float32")}
        )
        checkpoints.write(tmp_path / "checkpoints", name(step), files)
    return tmp_path / "checkpoints"


@pytest.fixture
def told() -> list[ev.Event]:
    return []


@pytest.fixture
def store(folder: Path, told: list[ev.Event]) -> Store:
    launch: Any = SimpleNamespace(
        checkpoint_dir=str(folder), keep=3, checkpoint_timeout_s=60.0, rank=0,
        checkpoint_url=None, measure=False, attempt=2, run_id="r",
    )  # fmt: skip
    channel: Any = SimpleNamespace(send=told.append)
    return Store(launch, channel)


def _input_output_error(file: Path) -> None:
    file.unlink()
    file.symlink_to("/proc/self/mem")  # nothing is mapped at its beginning


def _loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize(
    ("file", "fault"),
    [("arrays.bin", _input_output_error), ("MANIFEST.json", _loop)],
)
def test_what_cannot_be_read_now_is_never_deleted(
    folder: Path, store: Store, told: list[ev.Event], file: str,
    fault: Callable[[Path], None],
) -> None:  # fmt: skip
    whole = {step: (folder / name(step) / file).read_bytes() for step in STEPS}
    fault(folder / name(3) / file)
    found = store.find(1, {})
    assert found is not None
    assert found[0]["step"] == 2
    assert [getattr(event, "name", "") for event in told] == [name(3)]
    for step in STEPS[:2]:
        fault(folder / name(step) / file)
    told.clear()
    with pytest.raises(UnreadableError, match="does not begin anew"):
        store.find(1, {})
    # It looks several times, and tells of each once.
    assert [getattr(event, "name", "") for event in told] == [name(3), name(2), name(1)]
    assert checkpoints.names(folder, "step") == [name(3), name(2), name(1)]
    for step in STEPS:
        (folder / name(step) / file).unlink()
        (folder / name(step) / file).write_bytes(whole[step])
    again = store.find(1, {})
    assert again is not None
    assert again[0]["step"] == 3


def test_a_process_without_descriptors_deletes_nothing(
    folder: Path, store: Store
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(folder, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(folder, os.O_RDONLY)
        with pytest.raises(UnreadableError):
            checkpoints.read(folder / name(3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held[0])
    assert store.find(1, {}) is not None


@pytest.mark.parametrize("file", ["arrays.bin", "MANIFEST.json"])
def test_what_is_damaged_is_deleted_as_ever(
    folder: Path, store: Store, file: str
) -> None:
    (folder / name(3) / file).unlink()
    found = store.find(1, {})
    assert found is not None
    assert found[0]["step"] == 2
    assert checkpoints.names(folder, "step") == [name(2), name(1)]
