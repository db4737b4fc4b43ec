"""The server at which workers meet, and what each is told."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator

import pytest

from oomrun.core.errors import LaunchError
from oomrun.hosts import check_own_name
from oomrun.ranks import Rendezvous


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with contextlib.closing(Rendezvous()) as made:
        yield made


def ask(server: Rendezvous, method: str, path: str, body: bytes | None = None) -> bytes:
    """The answer's body, after its status."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return f"{answer.status} ".encode() + answer.read()


def test_a_value_is_there_once_it_was_put(rendezvous: Rendezvous) -> None:
    assert ask(rendezvous, "GET", "/global/0") == b"404 "
    assert ask(rendezvous, "PUT", "/global/0", b"\x00\xffaddress") == b"200 "
    assert ask(rendezvous, "GET", "/global/0") == b"200 \x00\xffaddress"
    assert ask(rendezvous, "GET", "/global/1") == b"404 "
    assert ask(rendezvous, "DELETE", "/global/0") == b"200 "


def test_what_is_no_value_is_refused(rendezvous: Rendezvous) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", rendezvous.port, timeout=60)
    with contextlib.closing(connection):
        connection.putrequest("PUT", "/global/0")
        connection.putheader("Content-Length", str(2**40))
        connection.endheaders()
        assert connection.getresponse().status == 400


def test_each_attempt_has_its_own(rendezvous: Rendezvous) -> None:
    with contextlib.closing(Rendezvous()) as other:
        assert other.port != rendezvous.port
        ask(rendezvous, "PUT", "/global/0", b"x")
        assert ask(other, "GET", "/global/0") == b"404 "


def test_it_is_gone_when_closed() -> None:
    made = Rendezvous()
    made.close()
    with pytest.raises(ConnectionRefusedError):
        ask(made, "GET", "/")


def test_who_each_worker_is(rendezvous: Rendezvous) -> None:
    told = [rendezvous.environment("horovod", rank, 3) for rank in range(3)]
    assert [env["HOROVOD_RANK"] for env in told] == ["0", "1", "2"]
    assert [env["HOROVOD_LOCAL_RANK"] for env in told] == ["0", "1", "2"]
    assert {env["HOROVOD_SIZE"] for env in told} == {"3"}
    assert {env["HOROVOD_GLOO_RENDEZVOUS_PORT"] for env in told} == {
        str(rendezvous.port)
    }


def test_a_host_that_others_cannot_find_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    check_own_name("127.0.0.1")  # nobody else has to
    with pytest.raises(LaunchError, match=r"should be: 192\.0\.2\.1 "):
        check_own_name("192.0.2.1")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "192.0.2.7")
    check_own_name("192.0.2.1")
