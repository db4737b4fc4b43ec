"""The run directory: paths, the lock, whole files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomrun.core.errors import PlatformError
from oomrun.rundir import RunDir, set_aside, write_atomically

HOLD = """
import sys
from pathlib import Path
from oomrun.rundir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_paths() -> None:
    run = RunDir(Path("runs/x"))
    assert run.attempt(3).log(1) == Path("runs/x/attempts/0003/rank-1.log")
    assert run.attempt(12345).plan == Path("runs/x/attempts/12345/plan.json")
    assert run.journal == Path("runs/x/journal.jsonl")
    assert run.checkpoints == Path("runs/x/checkpoints")


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(PlatformError, match=rf"\(pid {holder.pid}\)"), run.locked():
            pass
        holder.kill()
    with run.locked():
        assert run.lock.read_text() == f"{os.getpid()}\n"


def test_the_lock_can_be_taken_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for _ in range(2):
        with run.locked():
            pass


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.locked():
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with run.locked():
            pass
    finally:
        child.kill()
        child.wait()


def test_set_aside_takes_the_first_free_name(tmp_path: Path) -> None:
    for expected in ("run.1", "run.2"):
        RunDir(tmp_path / "run").create()
        assert set_aside(tmp_path / "run") == tmp_path / expected
    assert not (tmp_path / "run").exists()


def test_of_a_link_the_folder_is_set_aside_that_it_leads_to(tmp_path: Path) -> None:
    large = tmp_path / "large" / "run"
    RunDir(large).create()
    (large / "journal.jsonl").touch()
    link = tmp_path / "run"
    link.symlink_to(large)
    assert set_aside(link) == tmp_path / "large" / "run.1"
    RunDir(link).create()
    assert link.resolve() == large
    assert not (large / "journal.jsonl").exists()
    assert (tmp_path / "large" / "run.1" / "journal.jsonl").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(PlatformError, match="run: cannot be made"):
        RunDir(tmp_path / "run").create()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.mkdir()
    with pytest.raises(PlatformError, match=r"plan\.json: cannot be written"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
