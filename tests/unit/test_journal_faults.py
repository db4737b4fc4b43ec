"""A journal that a dead supervisor left torn, at every byte of its last 4 KiB.

The journal is one of a real run: memory ran out, memory leaked, oomrun was killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from history import watched_run
from oomrun import journal
from oomrun.core import events as ev
from oomrun.core import policy
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.errors import JournalError
from oomrun.core.policy import Limits
from oomrun.core.state import replay
from oomrun.takeover import undecided

_LAST = 4096
LIMITS = Limits(max_restarts={"oom": 10, "crash": 3, "preemption": None, "hang": 3})


def events() -> list[ev.Event]:
    """The run's first event and its last ones, of more than 4 KiB."""
    found = watched_run(end=1e9)
    return [found[0], *found[-20:]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    with journal.Journal(path) as book:
        for event in events():
            book.append(event)
    content = path.read_bytes()
    assert len(content) > _LAST
    return content


def test_torn_at_every_byte_of_its_last_pages(tmp_path: Path, whole: bytes) -> None:
    path, known, seen = tmp_path / "journal.jsonl", events(), set()
    for cut in range(len(whole) - _LAST, len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        found = journal.read(path)
        assert found == known[:kept]
        seen.add(kept)
    # Whatever is left, the run can be taken up from there.
    for kept in seen:
        state = replay(known[:kept])
        assert state.run_id == replay(known).run_id
        undecided(known[:kept])
        ended = Diagnosis(cause=Cause.KILLED, summary="killed")
        assert isinstance(policy.decide(ended, state, LIMITS), policy.Restart)


def test_a_bit_flipped_in_its_last_pages_is_an_error_or_a_torn_end(
    tmp_path: Path, whole: bytes
) -> None:
    path, known = tmp_path / "journal.jsonl", events()
    start_of_last = whole.rfind(b"\n", 0, len(whole) - 1) + 1
    for place in range(len(whole) - _LAST, len(whole), 7):
        flipped = bytearray(whole)
        flipped[place] ^= 0x80  # no byte of ASCII: what is read cannot be as it was
        path.write_bytes(flipped)
        # A line that has lost its end is one with the next.
        if place >= start_of_last or place == start_of_last - 1:
            assert journal.read(path)[: len(known) - 2] == known[:-2]
        else:
            with pytest.raises(JournalError, match="damaged"):
                journal.read(path)
