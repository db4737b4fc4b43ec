"""The journal: what is appended is read back, whatever became of its writer."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from oomrun import journal
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.errors import JournalError

NOTES = [ev.Noted(at=float(n), attempt=1, code=f"n{n}", text="ü\n") for n in range(5)]


def written(path: Path) -> bytes:
    with journal.Journal(path) as book:
        for note in NOTES:
            book.append(note)
    return path.read_bytes()


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    assert journal.read(path) == NOTES
    with journal.Journal(path) as book:
        assert book.events == NOTES


def test_no_journal_is_an_empty_one(tmp_path: Path) -> None:
    assert journal.read(tmp_path / "journal.jsonl") == []


def test_every_line_is_one_json_object(tmp_path: Path) -> None:
    lines = written(tmp_path / "journal.jsonl").decode().splitlines()
    assert [json.loads(line)["code"] for line in lines] == [n.code for n in NOTES]


def test_torn_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        assert journal.read(path) == NOTES[:kept]
        with journal.Journal(path) as book:
            book.append(NOTES[0])
        assert journal.read(path) == [*NOTES[:kept], NOTES[0]]


@pytest.mark.parametrize(
    "last", [b"\0\0\0\0", b"\0\0\0\n", b'{"type": "no\n', b"{\xff}\n"]
)
def test_a_last_line_of_garbage_is_torn_too(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(written(path) + last)
    assert journal.read(path) == NOTES
    with journal.Journal(path) as book:
        book.append(NOTES[0])
    assert journal.read(path) == [*NOTES, NOTES[0]]


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[2:]]))
    with pytest.raises(JournalError, match=r"journal\.jsonl:3: this line is damaged"):
        journal.read(path)
    with pytest.raises(JournalError, match=r":3:"):
        journal.Journal(path)


def test_json_that_is_no_event_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"type": "noted"}\n' + written(tmp_path / "other"))
    with pytest.raises(JournalError, match=r"journal\.jsonl:1: no event of oomrun"):
        journal.read(path)


def test_events_of_a_newer_version_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    newer = {"v": 2, "type": "moon_phase", "at": 1.0, "phase": "full"}
    path.write_text(json.dumps(newer) + "\n")
    (event,) = journal.read(path)
    assert isinstance(event, ev.Unknown)
    assert event_json.to_json(event) == newer


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with journal.Journal(path) as book:
        book.append(NOTES[0])
        size = path.stat().st_size
        # The limit cuts the next write off in mid-line, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(JournalError) as caught:
                book.append(NOTES[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.strerror(errno.EFBIG).lower() in str(caught.value)
        assert path.stat().st_size == size
        book.append(NOTES[2])
    assert journal.read(path) == [NOTES[0], NOTES[2]]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened: no such file"):
        journal.Journal(tmp_path / "nowhere" / "journal.jsonl")


def test_a_journal_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is a directory"):
        journal.read(tmp_path)
    with pytest.raises(JournalError, match="is a directory"):
        journal.Journal(tmp_path)


def test_what_is_no_json_is_not_written(tmp_path: Path) -> None:
    with (
        journal.Journal(tmp_path / "j") as book,
        pytest.raises(ValueError, match="JSON"),
    ):
        book.append(ev.Noted(at=float("nan"), attempt=1, code="", text=""))
