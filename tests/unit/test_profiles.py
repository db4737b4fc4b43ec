"""The store of profiles: runs at once, kills, damaged files, bounds."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomrun.core.profile import Profile, digest
from oomrun.profiles import Profiles, folder_of

KEY = '{"model":"m"}'
PROFILE = Profile(state_bytes=10, measured={8: 100}, failed={16: 150}, steps=3)

WRITER = """
import sys
from pathlib import Path
from oomrun.core.profile import Profile
from oomrun.profiles import Profiles
folder, key, begin, count = sys.argv[1:]
store = Profiles(Path(folder))
print("ready", flush=True)
sys.stdin.readline()
for size in range(int(begin), int(begin) + int(count)):
    store.store(key, Profile(measured={size: 1000 + size}, steps=size))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "profiles"


def _writer(folder: Path, key: str, begin: int, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), key, str(begin), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _go(writer: subprocess.Popen[bytes]) -> None:
    assert writer.stdin is not None
    writer.stdin.write(b"\n")
    writer.stdin.flush()


def _file(folder: Path, key: str = KEY) -> Path:
    return folder / f"{digest(key)}.json"


def test_what_was_stored_is_loaded_and_joined(folder: Path) -> None:
    store = Profiles(folder)
    assert store.load(KEY) is None
    assert not folder.exists()
    store.store(KEY, PROFILE)
    assert Profiles(folder).load(KEY) == PROFILE
    store.store(KEY, Profile(measured={4: 50}, steps=9))
    assert store.load(KEY) == Profile(
        state_bytes=10, measured={4: 50, 8: 100}, failed={16: 150}, steps=9
    )
    assert store.load(KEY + " ") is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, Path("/c/oomrun/profiles")),
        ({"HOME": "/h"}, Path("/h/.cache/oomrun/profiles")),
        ({"XDG_CACHE_HOME": "rel", "HOME": "/h"}, Path("/h/.cache/oomrun/profiles")),
        ({"XDG_CACHE_HOME": "", "HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_folder_is_that_of_the_xdg_rules(
    environment: dict[str, str], expected: Path | None
) -> None:
    assert folder_of(environment) == expected


def test_writers_at_once_lose_nothing(folder: Path) -> None:
    writers = [_writer(folder, KEY, 1 + 15 * n, 15) for n in range(4)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        _go(writer)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    found = Profiles(folder).load(KEY)
    assert found is not None
    assert found.measured == {size: 1000 + size for size in range(1, 61)}
    assert found.steps == 60
    assert sorted(path.name for path in folder.iterdir()) == [
        _file(folder).name, "lock",
    ]  # fmt: skip


def test_writers_killed_at_any_moment_leave_a_readable_store(folder: Path) -> None:
    store = Profiles(folder)
    store.store(KEY, PROFILE)
    sizes = 0
    for _ in range(6):
        writer = _writer(folder, KEY, 1000, 10**6)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        _go(writer)
        # Once it writes, the kill comes wherever it is.
        before = _file(folder).stat().st_ino
        while _file(folder).stat().st_ino == before and writer.poll() is None:
            os.sched_yield()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = store.load(KEY)
        assert found is not None
        assert found.measured[8] == 100
        assert len(found.measured) >= sizes
        sizes = len(found.measured)
    assert sizes > 1
    (folder / ".half.json.1.tmp").write_bytes(b'{"version": 1, "ke')
    store.store(KEY, Profile(steps=5))
    assert not list(folder.glob(".*.tmp"))


def test_every_damaged_byte_is_noticed(folder: Path) -> None:
    store = Profiles(folder)
    store.store(KEY, PROFILE)
    path = _file(folder)
    good = path.read_bytes()
    noticed = 0
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 7
        path.write_bytes(bad)
        found = store.load(KEY)
        # A blank that became another kind of blank is no damage.
        assert found in (None, PROFILE)
        noticed += found is None
    assert noticed > len(good) * 0.9
    for length in range(len(good) - 1):
        path.write_bytes(good[:length])
        assert store.load(KEY) is None


def _changed(path: Path, **change: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def _of_another_key(folder: Path) -> None:
    other = KEY + "2"
    Profiles(folder).store(other, PROFILE)
    os.replace(_file(folder, other), _file(folder))


def _spoil(folder: Path, how: str) -> None:
    path = _file(folder)
    match how:
        case "newer version":
            _changed(path, version=3)
        case "version true":
            _changed(path, version=True)
        case "another key":
            _of_another_key(folder)
        case "another peak":
            _changed(path, profile={"measured": [[8, 1]]})
        case "deep":
            path.write_text("[" * 100_000)
        case "huge":
            path.write_text(" " * 300_000)
        case "folder":
            path.unlink()
            path.mkdir()
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case _:
            path.write_text(how)


@pytest.mark.parametrize(
    "how",
    ["newer version", "version true", "another key", "another peak", "deep", "huge",
     "folder", "pipe", "", "null", "[]", "{}", '{"version": NaN}', "\x00"],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_set_aside_and_named_once(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Profiles(folder)
    store.store(KEY, PROFILE)
    _spoil(folder, how)
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
        assert store.load(KEY) is None
    assert len(caplog.records) == 1
    assert str(_file(folder)) in caplog.text
    assert _file(folder).with_suffix(".bad").exists()
    store.store(KEY, PROFILE)
    assert store.load(KEY) == PROFILE


def test_storing_over_a_bad_file_sets_it_aside(folder: Path) -> None:
    store = Profiles(folder)
    store.store(KEY, PROFILE)
    _file(folder).write_text("{")
    store.store(KEY, Profile(steps=1))
    assert store.load(KEY) == Profile(steps=1)
    assert _file(folder).with_suffix(".bad").read_text() == "{"


def test_the_profiles_not_used_for_longest_go(folder: Path) -> None:
    store = Profiles(folder, kept=3)
    for number in range(3):
        store.store(str(number), Profile(steps=number))
        os.utime(_file(folder, str(number)), (1000 + number, 1000 + number))
    assert store.load("0") is not None  # used now, so that 1 is the oldest
    store.store("3", Profile(steps=3))
    assert [store.load(str(number)) is not None for number in range(4)] == [
        True, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["none", "under a file", "lock is a folder"])
def test_a_folder_that_cannot_be_used_is_no_problem(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder: Path | None = tmp_path / "p"
    if place == "none":
        folder = None
    elif place == "under a file":
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "p"
    else:
        (tmp_path / "p" / "lock").mkdir(parents=True)
    store = Profiles(folder)
    with caplog.at_level(logging.DEBUG):
        store.store(KEY, PROFILE)
        assert store.load(KEY) is None
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    assert bool(caplog.records) == (place != "none")


def test_a_folder_that_takes_no_more_still_gives_what_it_has(folder: Path) -> None:
    store = Profiles(folder)
    store.store(KEY, PROFILE)
    (folder / "lock").unlink()
    (folder / "lock").mkdir()
    store.store(KEY, Profile(steps=99))
    assert store.load(KEY) == PROFILE
