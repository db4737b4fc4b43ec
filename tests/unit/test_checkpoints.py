"""Checkpoint folders: all or nothing, and never trusted unread."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oomrun import checkpoints
from oomrun.core.errors import CheckpointError

FILES = {"arrays.bin": [b"abc" * 1000, b"", b"def"], "state.json": [b'{"a": 1}']}
CONTENT = {name: b"".join(chunks) for name, chunks in FILES.items()}


@pytest.fixture
def one(tmp_path: Path) -> Path:
    checkpoints.write(tmp_path, "step-0000000001-0001", FILES)
    return tmp_path / "step-0000000001-0001"


def test_what_was_written_is_read(one: Path) -> None:
    assert checkpoints.read(one) == CONTENT
    assert checkpoints.names(one.parent, "step") == [one.name]
    assert checkpoints.names(one.parent, "fit") == []
    assert checkpoints.names(one.parent / "missing", "step") == []


def test_the_size_is_that_of_the_content(tmp_path: Path) -> None:
    size = checkpoints.write(tmp_path, "fit-0001", FILES)
    assert size == sum(map(len, CONTENT.values()))


def test_newest_first_by_number_and_not_by_letter(tmp_path: Path) -> None:
    # An attempt that went back writes the same step again: the later attempt counts.
    for name in ("step-9-0002", "step-10-0001", "step-10-0003", "step-2-0009"):
        checkpoints.write(tmp_path, name, FILES)
    for stranger in ("step-x", "step-", "notes", ".unfinished-step-11-1-99"):
        (tmp_path / stranger).mkdir()
    assert checkpoints.names(tmp_path, "step") == [
        "step-10-0003", "step-10-0001", "step-9-0002", "step-2-0009",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["arrays.bin", "state.json", "MANIFEST.json"])
def test_a_file_that_is_missing_or_cut_is_noticed(one: Path, name: str) -> None:
    path = one / name
    whole = path.read_bytes()
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=one.name):
            checkpoints.read(one)
    path.write_bytes(whole + b"0")
    with pytest.raises(CheckpointError, match=one.name):
        checkpoints.read(one)
    path.unlink()
    with pytest.raises(CheckpointError, match=one.name):
        checkpoints.read(one)


def test_no_flipped_bit_changes_what_is_read(one: Path) -> None:
    for name in ("arrays.bin", "state.json", "MANIFEST.json"):
        path = one / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if len(whole) < 1000 else 97):
            for bit in range(8):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << bit
                path.write_bytes(flipped)
                try:
                    found = checkpoints.read(one)
                except CheckpointError:
                    continue
                # Only where the manifest says the same in other words.
                assert (name, found) == ("MANIFEST.json", CONTENT)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"[]", b"3", b"{}", b'{"files": 3}', b'{"files": ["arrays.bin"]}',
        b'{"files": {"arrays.bin": 3}}', b'{"files": {"arrays.bin": {}}}', b"\xff",
        b'{"files": {"..": {"size": 0, "sha256": ""}}}', b"null", b'{"files": null}',
        b'{"files": {"a\\u0000b": {}}}',
    ],
)  # fmt: skip
def test_any_manifest_is_an_error_and_not_a_crash(one: Path, manifest: bytes) -> None:
    (one / "MANIFEST.json").write_bytes(manifest)
    with pytest.raises(CheckpointError, match=one.name):
        checkpoints.read(one)


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-1"):
        checkpoints.read(tmp_path / "step-1")


# --- a writer that fails --------------------------------------------------------------


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may grow over 1 KiB, as on a disk that is full.

    Around the least possible: the limit is the process's, and pytest's own output may
    be a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_and_spares_the_old(one: Path) -> None:
    for name in ("step-2", one.name):
        with pytest.raises(OSError, match="large"), small_files():
            checkpoints.write(one.parent, name, FILES)
    assert [entry.name for entry in one.parent.iterdir()] == [one.name]
    assert checkpoints.read(one) == CONTENT


def test_a_source_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(tmp_path, "step-1", {"state.json": chunks()})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        checkpoints.write(tmp_path / "file", "step-1", FILES)


# Every call of a C function may be a system call: one child dies at each of them.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from oomrun import checkpoints

folder, what = Path(sys.argv[1]), sys.argv[2]
OLD, NEW = {"state.json": [b"old"]}, {"state.json": [b"new"] * 3, "a": [b"x"]}
GOOD = [{k: b"".join(v) for k, v in files.items()} for files in (OLD, NEW)]

def act():
    if what == "write":
        checkpoints.write(folder, "step-2", NEW)
    elif what == "overwrite":
        checkpoints.write(folder, "step-1", NEW)
    else:
        checkpoints.discard(folder / "step-1")

def child(left):
    def profile(frame, event, arg):
        nonlocal left
        if event in ("c_call", "c_return"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(profile)
    act()
    sys.setprofile(None)
    os._exit(0)

calls, seen = 0, set()
while True:
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints.write(folder, "step-0", OLD)
    checkpoints.write(folder, "step-1", OLD)
    calls += 1
    pid = os.fork()
    if pid == 0:
        child(calls)
    status = os.waitpid(pid, 0)[1]
    names = checkpoints.names(folder, "step")
    found = {name: checkpoints.read(folder / name) for name in names}
    assert all(content in GOOD for content in found.values()), found
    assert found.pop("step-0") == GOOD[0]
    if what == "write":
        assert found["step-1"] == GOOD[0]
    seen.add(tuple((n, GOOD.index(c)) for n, c in sorted(found.items())))
    checkpoints.remove_unfinished(folder)
    assert sorted(os.listdir(folder)) == sorted(names)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
print(calls, sorted(seen))
"""


@pytest.mark.parametrize(
    ("what", "outcomes"),
    [
        ("write", [(("step-1", 0),), (("step-1", 0), ("step-2", 1))]),
        ("overwrite", [(), (("step-1", 0),), (("step-1", 1),)]),
        ("discard", [(), (("step-1", 0),)]),
    ],
)
def test_a_kill_between_any_two_calls_leaves_only_whole_checkpoints(
    tmp_path: Path, what: str, outcomes: list[Any]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "folder"), what],
        text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls, seen = done.stdout.split(" ", 1)
    assert int(calls) > 20
    assert seen.strip() == str(outcomes)


def test_leftovers_are_removed_and_nothing_else(one: Path) -> None:
    shutil.copytree(one, one.parent / ".unfinished-step-7-123")
    (one.parent / "notes.txt").touch()
    checkpoints.remove_unfinished(one.parent)
    assert {p.name for p in one.parent.iterdir()} == {one.name, "notes.txt"}
    checkpoints.remove_unfinished(one.parent / "missing")


def test_the_manifest_is_for_people_too(one: Path) -> None:
    manifest = json.loads((one / "MANIFEST.json").read_text())
    assert manifest["version"] == 1
    assert manifest["files"]["state.json"]["size"] == 8
