"""How the workers of one attempt find each other: Horovod's way, without its launcher.

Covers: the key-value server that Horovod's Gloo controller meets at, and that the
workers of ``multi_worker_mirrored`` tell each other their addresses at; the variables
that say to each worker who it is. Does not cover: starting the workers (``launching``).

Source of what is relied on: horovod/common/gloo/http_store.cc and gloo_context.cc of
0.28.1. A worker puts its address under a scope and polls for those of the others,
taking 404 for "not yet"; DELETE says that it needs nothing more of a scope. An
unreachable server is tried three times only, half a second apart: so the server listens
before the first worker is started.
"""

from __future__ import annotations

import http.server
import ipaddress
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import psutil

from oomrun.core.errors import LaunchError
from oomrun.core.launch import ADDRESS, MEETING, SIZE

__all__ = ["Place", "Rendezvous", "of_host"]

_LOCAL = "127.0.0.1"
_LARGEST_VALUE = 1024 * 1024
_PATIENCE_S = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker is among those of all hosts.

    Attributes:
        host: what Horovod calls its host: another name for each.
        local_rank, local_size: among the workers of its host.
        cross_rank, cross_size: among those with its local rank, one of each host.
        address: where its host finds the rendezvous.
    """

    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    address: str


class Rendezvous:
    """A key-value server for one attempt, by default for this machine's workers only.

    Workers of another attempt must never meet these: each attempt has its own, with
    nothing in it.
    """

    def __init__(self, address: str = _LOCAL) -> None:
        try:
            self._server = _Server((address, 0), _Handler)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise LaunchError(
                f"no place for the workers to meet at: {why}", where=address
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="oomrun-rendezvous", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def environment(
        self, strategy: str, rank: int, size: int, place: Place | None = None
    ) -> dict[str, str]:
        """The variables of the worker ``rank`` of ``size``.

        Args:
            strategy: the plan's.
            rank: the worker's own.
            size: how many there are.
            place: None: all are on this machine. Else ``of_host`` is for the host to
                add, who knows how it is reached.
        """
        if strategy == "horovod":
            return self._of_horovod(rank, size, place)
        at = place.address if place is not None else _LOCAL
        told = {SIZE: str(size), MEETING: f"{at}:{self.port}"}
        return told if place is not None else {**told, ADDRESS: _LOCAL}

    def _of_horovod(self, rank: int, size: int, place: Place | None) -> dict[str, str]:
        common = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            # A worker may take longer than the 30 s that are the default: to recover
            # from an exhaustion, for one. That one has died, or hangs, we see.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_PATIENCE_S),
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
        }
        told = {} if place is not None else {"HOROVOD_GLOO_IFACE": "lo"}
        at = place or Place(
            host="localhost", local_rank=rank, local_size=size, cross_rank=0,
            cross_size=1, address=_LOCAL,
        )  # fmt: skip
        return {
            **common,
            **told,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": at.address,
            "HOROVOD_HOSTNAME": at.host,
            "HOROVOD_LOCAL_RANK": str(at.local_rank),
            "HOROVOD_LOCAL_SIZE": str(at.local_size),
            "HOROVOD_CROSS_RANK": str(at.cross_rank),
            "HOROVOD_CROSS_SIZE": str(at.cross_size),
        }

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def of_host(told: Mapping[str, str], address: str) -> dict[str, str]:
    """What a host adds to a worker's variables: how the other hosts reach it.

    Args:
        told: what ``Rendezvous.environment`` gives.
        address: the host's, towards the others.
    """
    if MEETING in told:
        return {ADDRESS: address}
    name = _interface(address)
    return {"HOROVOD_GLOO_IFACE": name} if name else {}


def _interface(address: str) -> str:
    """The network interface with this address, "" where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    # All of 127.0.0.0/8 is there, and only one of it is named.
    return "lo" if ipaddress.ip_address(address).is_loopback else ""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # all workers come at once

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values: dict[str, bytes] = {}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST_VALUE:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        self.server.values[self.path] = self.rfile.read(int(length))
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        # The server goes with its attempt, and all it knows with it.
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each request would fill the terminal."""
