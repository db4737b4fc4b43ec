"""A host of a gang other than the first: starts the workers that it is told to.

Covers: finding the supervisor, again and again where it is gone; workers here, whose
events go to the supervisor; telling it that this host is taken away. Does not cover:
any decision, nor the journal, which are the supervisor's (``gang`` is its side).

Without the supervisor nothing goes on: the workers here are ended at once. What it has
done last is in the journal, on the volume that all hosts share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from oomrun import devices, handshake, host, journal
from oomrun.connection import Connection
from oomrun.core import launch as launches
from oomrun.core import topology
from oomrun.core.errors import LaunchError, OomrunError
from oomrun.core.state import replay
from oomrun.gang import Meeting, digest
from oomrun.launching import Job, start_told
from oomrun.processes import Ended, Worker, sweep
from oomrun.ranks import of_host
from oomrun.stops import Stops

__all__ = ["serve"]

_log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_CONNECT_S = 5.0
_LOOK_INTO_JOURNAL_S = 5.0
_POLL_S = 0.05  # where the kernel cannot tell us of a process's end


def serve(job: Job, meeting: Meeting, *, stops: Stops) -> int:
    """Serves the run's supervisor until it sends us home; the exit code.

    Raises:
        LaunchError: the supervisor cannot be found, or does not want us.
    """
    strangers = 0
    while not stops.requested:
        connection = _find(job, meeting, stops)
        if connection is None:
            return 0 if not stops.requested else stops.exit_code
        with contextlib.closing(_Served(job, meeting, connection, stops)) as served:
            code = served.run()
        if code is not None:
            return code
        if served.known:
            strangers = 0
            _log.warning("the supervisor of the run is gone; waiting for the next one")
        elif (strangers := strangers + 1) * _AGAIN_S > meeting.patience_s:
            raise LaunchError(
                "who answers there is not the supervisor of this run, or sees another "
                f"run directory than {job.run_dir.path} on this host",
                where=f"{meeting.host}:{meeting.port}",
            )
        else:
            stops.sleep(_AGAIN_S)
    return stops.exit_code


def _find(job: Job, meeting: Meeting, stops: Stops) -> Connection | None:
    """A connection to the supervisor; None: to stop, or the run is complete."""
    until = time.monotonic() + meeting.patience_s
    look_at, why = 0.0, ""
    while not stops.requested:
        where = (meeting.host, meeting.port)
        try:
            sock = socket.create_connection(where, timeout=_CONNECT_S)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
        else:
            return Connection(sock)
        now = time.monotonic()
        if now >= look_at:
            # Whoever comes after the end finds nobody any more.
            if replay(journal.read(job.run_dir.journal)).state == "completed":
                return None
            look_at = now + _LOOK_INTO_JOURNAL_S
        if now >= until:
            raise LaunchError(
                f"the supervisor of the run cannot be reached: {why}",
                where=f"{meeting.host}:{meeting.port}",
            )
        stops.sleep(_AGAIN_S)
    return None


class _Served:
    """One connection to a supervisor, and the workers that it has here."""

    def __init__(
        self, job: Job, meeting: Meeting, connection: Connection, stops: Stops
    ) -> None:
        #: It has proved that it has this run.
        self.known = False
        self._job = job
        self._member = meeting.member
        self._nonce = handshake.nonce()
        self._connection = connection
        self._stops = stops
        self._workers: dict[int, Worker] = {}
        self._told_end: set[int] = set()
        self._told_stop = False
        self._kills_before = host.oom_kill_count() or 0
        self._code: int | None = None

    def run(self) -> int | None:
        """Serves; the exit code that we were sent home with, None: it is gone."""
        said = {"member": self._member, "digest": digest(self._job.job_text)}
        self._connection.send({**said, "nonce": self._nonce})
        while self._connection.open and self._code is None:
            self._wait()
            if self._stops.requested and not self._told_stop:
                self._told_stop = True
                self._connection.send({"stop": self._stops.number})
            for message in self._connection.read():
                self._do(message)
            self._pass_on()
        return self._code

    def close(self) -> None:
        """Ends the workers, and closes the connection."""
        for rank in list(self._workers):
            self._finish(rank)
        self._connection.close()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._connection.socket, select.POLLIN)
        if not self._told_stop:
            poll.register(self._stops, select.POLLIN)
        timeout_s: float | None = None
        for rank, worker in self._workers.items():
            if rank in self._told_end:
                continue
            if worker.channel is not None:
                poll.register(worker.channel, select.POLLIN)
            if worker.exit_fd is None:
                timeout_s = _POLL_S
            else:
                poll.register(worker.exit_fd, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)

    def _pass_on(self) -> None:
        """What the workers say, and that they have ended, in this order."""
        for rank, worker in self._workers.items():
            if rank in self._told_end:
                continue
            ended = worker.ending()
            self._tell_values(rank, worker.read() if ended is None else worker.drain())
            if ended is not None:
                self._told_end.add(rank)
                self._connection.send({"rank": rank, "ended": _json(ended)})

    def _do(self, message: Mapping[str, Any]) -> None:
        if not self.known and message["do"] not in ("prove", "refuse"):
            self._connection.close()
            return
        worker = self._workers.get(message.get("rank", -1))
        match message["do"]:
            case "prove":
                self._prove(message)
            case "look":
                job = self._job
                found = devices.discover({**job.environment, **dict(job.spec.env)})
                self._connection.send({"inventory": topology.to_json(found)})
            case "start":
                self._start(message)
            case "send" if worker is not None:
                worker.send(message["message"])
            case "signal" if worker is not None:
                way = worker.signal_group if message["group"] else worker.signal_process
                way(message["number"])
            case "finish" if worker is not None:
                self._finish(message["rank"])
            case "leave":
                self._code = message["exit_code"]
            case "refuse":
                raise LaunchError(f"the supervisor refuses us: {message['why']}")

    def _prove(self, message: Mapping[str, Any]) -> None:
        """Where the other side has the run's key, says that we have it as well."""
        try:
            key = handshake.key(self._job.run_dir.key)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            where = str(self._job.run_dir.key)
            raise LaunchError(f"cannot be read: {why}", where=where) from None
        said = (digest(self._job.job_text), self._member, self._nonce, message["nonce"])
        if key is not None:
            wanted = handshake.proof(key, handshake.SUPERVISOR, *said)
            self.known = handshake.is_proof(message.get("proof"), wanted)
        if key is None or not self.known:
            self._connection.close()
            return
        proof = handshake.proof(key, handshake.MEMBER, *said)
        self._connection.send({"proof": proof})

    def _start(self, message: Mapping[str, Any]) -> None:
        rank = message["rank"]
        try:
            launch = launches.from_json(
                {**message["launch"], "supervisor_pid": os.getpid()}
            )
            told = message["told"]
            told |= of_host(told, self._connection.own_address)
            self._told_end.discard(rank)
            self._workers[rank] = worker = start_told(self._job, launch, told)
        except OomrunError as error:
            self._connection.send({"rank": rank, "problem": str(error)})
        else:
            self._connection.send({"rank": rank, "pid": worker.pid})

    def _finish(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        ended = worker.finish()
        # Not by the run's id: another host of the gang may be on this machine.
        sweep("", descendants=self._job.owns_process and not self._workers)
        self._tell_values(rank, worker.drain())
        worker.close()
        kills = (host.oom_kill_count() or 0) - self._kills_before
        said = {"rank": rank, "finished": _json(ended), "oom_kills": max(0, kills)}
        self._connection.send(said)

    def _tell_values(self, rank: int, values: list[Any]) -> None:
        for value in values:
            self._connection.send({"rank": rank, "value": value})


def _json(ended: Ended) -> dict[str, int | None]:
    return {"exit_code": ended.exit_code, "signal": ended.signal}
