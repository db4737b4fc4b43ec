"""A connection between two hosts: whole lines in whatever pieces, and its end."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from oomrun.connection import Connection
from oomrun.core.launch import ADDRESS, MEETING, SIZE
from oomrun.ranks import Place, Rendezvous, of_host

Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    both = Connection(one), Connection(other)
    yield both
    for each in both:
        each.close()


def received(connection: Connection, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count and connection.open:
        found += connection.read()
    return found


def test_messages_come_as_they_were_sent(pair: Pair) -> None:
    one, other = pair
    sent = [{"n": n, "text": "é" * 1000} for n in range(200)]
    assert all(one.send(message) for message in sent)
    assert received(other, 200) == sent
    assert other.read() == []
    assert other.open


def test_more_than_fits_on_the_way(pair: Pair) -> None:
    one, other = pair
    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    large = {"text": "x" * 100_000}
    assert one.send(large)
    assert received(other, 1) == [large]


def test_the_other_side_is_gone(pair: Pair) -> None:
    one, other = pair
    one.send({"last": 1})
    one.close()
    one.close()
    assert received(other, 2) == [{"last": 1}]
    assert not other.open
    assert not other.send({})
    assert not one.send({})
    assert one.read() == []


def test_both_sides_are_heard_though_they_say_nothing(pair: Pair) -> None:
    for each in pair:
        readable, _, _ = select.select([each.socket], [], [], 60)
        assert readable
        assert each.read() == []
        assert each.open


def test_addresses(pair: Pair) -> None:
    one, other = pair
    assert one.own_address == other.their_address == "127.0.0.1"


def test_the_interface_of_an_address() -> None:
    for address in ("127.0.0.1", "127.0.0.7"):
        assert of_host({}, address) == {"HOROVOD_GLOO_IFACE": "lo"}
    assert of_host({}, "192.0.2.1") == {}


THERE = Place(
    host="member-1", local_rank=0, local_size=2, cross_rank=1, cross_size=3,
    address="10.0.0.1",
)  # fmt: skip


def test_a_worker_on_another_host_is_told_where_it_is() -> None:
    with contextlib.closing(Rendezvous("")) as meeting:
        told = meeting.environment("horovod", 4, 6, THERE)
    assert told["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert told["HOROVOD_HOSTNAME"] == "member-1"
    assert (told["HOROVOD_RANK"], told["HOROVOD_SIZE"]) == ("4", "6")
    assert (told["HOROVOD_LOCAL_RANK"], told["HOROVOD_LOCAL_SIZE"]) == ("0", "2")
    assert (told["HOROVOD_CROSS_RANK"], told["HOROVOD_CROSS_SIZE"]) == ("1", "3")
    assert "HOROVOD_GLOO_IFACE" not in told  # its host knows


def test_and_where_the_others_meet() -> None:
    with contextlib.closing(Rendezvous("")) as meeting:
        told = meeting.environment("multi_worker_mirrored", 4, 6, THERE)
    assert told == {SIZE: "6", MEETING: f"10.0.0.1:{meeting.port}"}
    assert of_host(told, "10.0.0.2") == {ADDRESS: "10.0.0.2"}  # its host knows
