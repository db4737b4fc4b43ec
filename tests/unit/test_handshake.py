"""Hosts of a gang that prove to each other that they belong to one run.

Covers: the key's file, proofs, strangers at the supervisor's port. Does not cover:
strangers who take the supervisor's place (``tests/e2e/test_gang.py``).
"""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oomrun import handshake
from oomrun.core.errors import PlatformError
from oomrun.gang import Gang, Meeting, digest
from oomrun.stops import Stops

JOB = b"name: job\n"


def test_the_key_is_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert handshake.key(path) is None
    made = handshake.made_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert handshake.made_key(path) == handshake.key(path) == made
    assert handshake.made_key(tmp_path / "other") != made
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key", "other"]


def test_half_a_key_is_none(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(handshake.made_key(tmp_path / "whole")[:-1])
    assert handshake.key(path) is None
    assert handshake.key(path) != handshake.made_key(path) == handshake.key(path)


def test_a_key_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="no such file"):
        handshake.made_key(tmp_path / "missing" / "key")


def test_a_proof_holds_for_what_was_said_and_by_whom() -> None:
    key, said = b"k", ("digest", 1, "theirs", "ours")
    wanted = handshake.proof(key, handshake.MEMBER, *said)
    assert handshake.is_proof(wanted, wanted)
    others = [
        handshake.proof(b"l", handshake.MEMBER, *said),
        handshake.proof(key, handshake.SUPERVISOR, *said),
        *(
            handshake.proof(key, handshake.MEMBER, *said[:at], "x", *said[at + 1 :])
            for at in range(len(said))
        ),
    ]
    for other in (*others, "", None, 7, "é", wanted[:-1]):
        assert not handshake.is_proof(other, wanted)


class Client:
    """Somebody at the supervisor's port."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._lines = self._socket.makefile("rb")

    def say(self, **message: Any) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        """What is said next; None where we are sent away."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    meeting = Meeting(size=2, member=0, host="127.0.0.1", port=0, patience_s=60.0)
    stops = Stops()
    made = Gang(meeting, JOB, stops, tmp_path / "key")
    yield made
    made.close()
    stops.close()


def heard(gang: Gang) -> None:
    gang._wait(5.0)


@pytest.fixture
def client(gang: Gang) -> Iterator[Client]:
    made = Client(gang.port)
    heard(gang)
    yield made
    made.close()


def hello(client: Client, gang: Gang) -> dict[str, Any]:
    client.say(member=1, digest=digest(JOB), nonce="mine")
    heard(gang)
    answer = client.hear()
    assert isinstance(answer, dict)
    return answer


def proofs(key: bytes, answer: dict[str, Any]) -> tuple[str, str]:
    said = (digest(JOB), 1, "mine", answer["nonce"])
    return (
        handshake.proof(key, handshake.SUPERVISOR, *said),
        handshake.proof(key, handshake.MEMBER, *said),
    )


def test_a_member_is_let_in(gang: Gang, client: Client, tmp_path: Path) -> None:
    answer = hello(client, gang)
    key = handshake.key(tmp_path / "key")
    assert key is not None
    theirs, ours = proofs(key, answer)
    assert (answer["do"], answer["proof"]) == ("prove", theirs)
    client.say(proof=ours)
    heard(gang)
    assert client.hear() == {"do": "look"}


@pytest.mark.parametrize("given", ["", "another key's", "the supervisor's own", None])
def test_a_stranger_is_not(gang: Gang, client: Client, given: str | None) -> None:
    answer = hello(client, gang)
    theirs, strange = proofs(b"guessed", answer)
    said = {"another key's": strange, "the supervisor's own": answer["proof"]}
    assert theirs != answer["proof"]
    client.say(proof=said.get(given or "", given), inventory={})
    heard(gang)
    assert client.hear() is None


def test_what_was_once_a_proof_is_none_any_more(
    gang: Gang, client: Client, tmp_path: Path
) -> None:
    _, once = proofs(handshake.made_key(tmp_path / "key"), hello(client, gang))
    again = Client(gang.port)
    heard(gang)
    hello(again, gang)
    again.say(proof=once)
    heard(gang)
    assert again.hear() is None
    again.close()


def test_nobody_is_told_to_prove_what_it_has_no_part_in(
    gang: Gang, client: Client, tmp_path: Path
) -> None:
    client.say(member=1, digest=digest(b"other"), nonce="mine")
    heard(gang)
    answer = client.hear()
    assert answer["do"] == "refuse"
    assert client.hear() is None
    assert not (tmp_path / "key").exists()


def test_who_has_not_proved_itself_is_sent_home_all_the_same(
    gang: Gang, client: Client
) -> None:
    """A member that waits for the next attempt, which there will not be."""
    client.say(member=1, digest=digest(JOB), nonce="mine")
    gang.dismiss(3)
    assert client.hear()["do"] == "prove"
    assert client.hear() == {"do": "leave", "exit_code": 3}
