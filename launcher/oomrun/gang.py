"""The hosts of one run, as its supervisor has them: on host 0, with a member on each.

Covers: waiting until all are there, their devices, workers that run on them, sending
them home. Does not cover: the members' own side (``member``), how an attempt is watched
(``attempts``), which sees these workers as it sees those of its own machine.

A member that is gone takes its workers with it: that is how they have ended then. The
attempt ends, and the next one begins when all members are there again, whoever replaced
the lost one. Only one connection a host is needed, made by the member, so that nobody
has to let commands in.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oomrun
from oomrun.connection import Connection
from oomrun.core import topology
from oomrun.core.errors import LaunchError, PlatformError
from oomrun.core.topology import Inventory
from oomrun.core.units import format_duration
from oomrun.handshake import Newcomer
from oomrun.processes import Ended
from oomrun.ranks import Place
from oomrun.stops import Stops

__all__ = ["Gang", "Meeting", "RemoteWorker", "digest"]

_log = logging.getLogger(__name__)

_ANSWER_S = 60.0  # for what a member does at once; opening a driver takes long
_FIRST_WORD_S = 10.0
_SAID_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Which host of a gang this is, and where all of them meet.

    Attributes:
        size: how many hosts there are.
        member: which of them this is; 0 has the supervisor.
        host, port: where the supervisor listens, as the others call it.
        patience_s: how long one waits for the others.
    """

    size: int
    member: int
    host: str
    port: int
    patience_s: float


def digest(job_text: bytes) -> str:
    """What the members of a gang must have in common."""
    return hashlib.sha256(oomrun.__version__.encode() + b"\0" + job_text).hexdigest()


class RemoteWorker:
    """A worker on a member's host, with what ``attempts`` needs of a worker."""

    def __init__(self, member: _Member, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.oom_kills = 0
        self.problem = ""
        self.values: list[Any] = []
        self.ended: Ended | None = None
        self.finished: Ended | None = None
        self._member = member

    @property
    def channel(self) -> socket.socket | None:
        """The connection to its host, which may bring news of others, too."""
        return self._member.connection.socket if self.ended is None else None

    @property
    def exit_fd(self) -> int | None:
        """Also the connection."""
        return None if self.ended else self._member.connection.socket.fileno()

    def read(self) -> list[Any]:
        """What it has sent."""
        self._member.pump()
        values, self.values = self.values, []
        return values

    def drain(self) -> list[Any]:
        """The same: its host sends all of it before it tells the end."""
        return self.read()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends it a message; False where its host is gone."""
        return self.ended is None and self._tell("send", message=dict(message))

    def exited(self) -> bool:
        """Whether it has ended."""
        return self.ending() is not None

    def ending(self) -> Ended | None:
        """How it has ended; None while it lives."""
        self._member.pump()
        return self.finished or self.ended

    def signal_process(self, number: int) -> None:
        """Has a signal sent to the process alone."""
        self._tell("signal", number=number, group=False)

    def signal_group(self, number: int) -> None:
        """Has a signal sent to all of its group."""
        self._tell("signal", number=number, group=True)

    def finish(self) -> Ended:
        """Has what is left of it killed; says how it ended."""
        self._tell("finish")
        self._member.wait_for(lambda: self.finished is not None)
        assert self.finished is not None
        return self.finished

    def close(self) -> None:
        """Nothing of it is here."""

    def _tell(self, what: str, **more: Any) -> bool:
        if self.finished is not None:
            return False
        return self._member.connection.send({"do": what, "rank": self.rank, **more})


class _Member:
    """A host that has come."""

    def __init__(self, number: int, connection: Connection, stops: Stops) -> None:
        self.name = f"member {number} ({connection.their_address})"
        self.connection = connection
        self.inventory: Inventory | None = None
        self.workers: dict[int, RemoteWorker] = {}
        self._stops = stops

    def pump(self) -> None:
        """Hands out what has arrived."""
        for message in self.connection.read():
            try:
                self._take(message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                _log.warning("%s said something odd: %r", self.name, error)
        if not self.connection.open:
            self.lose()

    def wait_for(self, done: Any) -> None:
        """Until ``done()``; a host that does not answer is given up."""
        until = time.monotonic() + _ANSWER_S
        while not done():
            left = until - time.monotonic()
            if left <= 0:
                self.lose()
                return
            select.select([self.connection.socket], [], [], left)
            self.pump()
            if not self.connection.open:
                return

    def lose(self) -> None:
        """It is gone, and its workers with it."""
        self.connection.close()
        gone = Ended(exit_code=None, signal=None, lost=self.name)
        for worker in self.workers.values():
            worker.ended = worker.ended or gone
            worker.finished = worker.finished or worker.ended

    def _take(self, message: Mapping[str, Any]) -> None:
        if "stop" in message:
            # Its machine is taken away; without it the others cannot go on either.
            self._stops.request(signal.SIGTERM)
        elif "inventory" in message:
            self.inventory = topology.from_json(message["inventory"])
        else:
            self._of_worker(self.workers[message["rank"]], message)

    def _of_worker(self, worker: RemoteWorker, message: Mapping[str, Any]) -> None:
        if "value" in message:
            worker.values.append(message["value"])
        elif "pid" in message:
            worker.pid = int(message["pid"])
        elif "problem" in message:
            worker.problem = str(message["problem"])
        elif "ended" in message:
            worker.ended = _ended(message["ended"])
        elif "finished" in message:
            worker.finished = worker.ended = _ended(message["finished"])
            worker.oom_kills = int(message["oom_kills"])


def _ended(value: Mapping[str, Any]) -> Ended:
    return Ended(exit_code=value["exit_code"], signal=value["signal"])


class Gang:
    """All hosts of the run.

    It listens as long as it lives: a host that comes back in the middle of an attempt
    waits for the next one.
    """

    def __init__(
        self, meeting: Meeting, job_text: bytes, stops: Stops, key_file: Path
    ) -> None:
        self._meeting = meeting
        self._key_file = key_file
        self._digest = digest(job_text)
        self._stops = stops
        self._members: dict[int, _Member] = {}
        self._new: list[Newcomer] = []
        try:
            self._listener = socket.create_server(("", meeting.port), backlog=256)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            where = f"port {meeting.port}"
            raise LaunchError(
                f"cannot listen for members: {why}", where=where
            ) from None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def assemble(self) -> list[Inventory]:
        """Waits until all are there; the hosts of members 1, 2, … as they are now.

        Returns:
            Nothing where we were asked to stop meanwhile.

        Raises:
            LaunchError: some did not come in time.
        """
        self._say_all("look")
        until, said_at = time.monotonic() + self._meeting.patience_s, 0.0
        while missing := self._missing():
            now = time.monotonic()
            if self._stops.requested:
                return []
            if now >= until:
                waited = format_duration(self._meeting.patience_s)
                raise LaunchError(f"{_named(missing)} did not come within {waited}")
            if now >= said_at + _SAID_S:
                _log.warning("waiting for %s", _named(missing))
                said_at = now
            self._wait(min(until - now, _SAID_S))
        found = [member.inventory for _, member in sorted(self._members.items())]
        return [inventory for inventory in found if inventory is not None]

    def start(
        self, host: int, rank: int, launch: Mapping[str, Any], told: Mapping[str, str]
    ) -> RemoteWorker:
        """Has a worker started on a member's host.

        Args:
            host: the member's number.
            rank: the worker's.
            launch: what it is told, as JSON.
            told: variables that say who it is in the group.

        Raises:
            LaunchError: its host cannot start it.
        """
        member = self._members[host]
        worker = RemoteWorker(member, rank)
        member.workers[rank] = worker
        asked = {"do": "start", "rank": rank, "launch": launch, "told": dict(told)}
        member.connection.send(asked)
        member.pump()
        member.wait_for(lambda: worker.pid or worker.problem or worker.finished)
        if worker.problem:
            raise LaunchError(worker.problem, where=member.name)
        return worker

    def places(self, hosts: Sequence[int]) -> list[Place]:
        """Where each worker is, from the number of its host; by rank."""
        sizes = {host: hosts.count(host) for host in hosts}
        seen: dict[int, int] = {}
        places = []
        for host in hosts:
            local = seen.get(host, 0)
            seen[host] = local + 1
            alike = [other for other, size in sizes.items() if size > local]
            # Its own, too, is the address under which the others find it.
            reached = self._members[host if host else min(self._members)].connection
            places.append(
                Place(
                    host=f"member-{host}", local_rank=local, local_size=sizes[host],
                    cross_rank=alike.index(host), cross_size=len(alike),
                    address=reached.own_address,
                )
            )  # fmt: skip
        return places

    def dismiss(self, exit_code: int) -> None:
        """Sends all members home, to end with this exit code."""
        self._accept()
        for newcomer in self._new:
            # What it says first is on its way.
            select.select([newcomer.connection.socket], [], [], _FIRST_WORD_S / 10)
            with contextlib.suppress(PlatformError):
                newcomer.hear()
            if newcomer.asked:
                newcomer.connection.send({"do": "leave", "exit_code": exit_code})
        self._say_all("leave", exit_code=exit_code)

    def close(self) -> None:
        """Closes all connections; members that were not sent home come again."""
        for member in self._members.values():
            member.connection.close()
        for newcomer in self._new:
            newcomer.connection.close()
        self._listener.close()

    def _say_all(self, what: str, **more: Any) -> None:
        for member in self._members.values():
            member.workers.clear()
            member.inventory = None
            member.connection.send({"do": what, **more})

    def _missing(self) -> list[int]:
        for number, member in list(self._members.items()):
            member.pump()
            if not member.connection.open:
                del self._members[number]
        there = {n for n, member in self._members.items() if member.inventory}
        return [n for n in range(1, self._meeting.size) if n not in there]

    def _wait(self, seconds: float) -> None:
        """For news of a host, a new one, or a request to stop."""
        known = [member.connection.socket for member in self._members.values()]
        new = [newcomer.connection.socket for newcomer in self._new]
        if self._new:
            seconds = min(seconds, _FIRST_WORD_S)
        waited: list[Any] = [self._listener, self._stops, *known, *new]
        select.select(waited, [], [], seconds)
        self._accept()
        now = time.monotonic()
        still: list[Newcomer] = []
        for newcomer in self._new:
            newcomer.hear()
            if newcomer.proved:
                self._let_in(newcomer.connection, newcomer.number)
            elif newcomer.connection.open and now <= newcomer.came_at + _FIRST_WORD_S:
                still.append(newcomer)
            else:
                newcomer.connection.close()
        self._new = still

    def _accept(self) -> None:
        self._listener.setblocking(False)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._new.append(
                Newcomer(
                    Connection(sock), self._digest, self._meeting.size, self._key_file
                )
            )

    def _let_in(self, connection: Connection, number: int) -> None:
        before = self._members.pop(number, None)
        if before is not None:  # its end has not reached us yet
            before.lose()
        self._members[number] = _Member(number, connection, self._stops)
        connection.send({"do": "look"})


def _named(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"member{'s' if len(numbers) > 1 else ''} {shown}{more} of the gang"
