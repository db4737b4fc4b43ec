"""How the workers of one attempt find each other: Horovod's way, without its launcher.

Covers: the key-value server that Horovod's Gloo controller meets at, and the variables
that tell each worker who it is. Does not cover: starting the workers (``launching``).

Source of what is relied on: horovod/common/gloo/http_store.cc and gloo_context.cc of
0.28.1. A worker puts its address under a scope and polls for those of the others,
taking 404 for "not yet"; DELETE says that it needs nothing more of a scope. An
unreachable server is tried three times only, half a second apart: so the server listens
before the first worker is started.
"""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import psutil

from oomrun.core.errors import LaunchError

__all__ = [
    "INTERFACE",
    "MEETING",
    "Rendezvous",
    "address_towards",
    "check_own_name",
    "interface_towards",
]

#: Environment variable of Horovod's: the network that its workers use.
INTERFACE = "HOROVOD_GLOO_IFACE"
#: Environment variable of Horovod's: the address that the workers meet at.
MEETING = "HOROVOD_GLOO_RENDEZVOUS_ADDR"

_LOCAL = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent to it
_LARGEST_VALUE = 1024 * 1024
_PATIENCE_S = 24 * 3600


def address_towards(address: str) -> str:
    """The address by which this host is known where ``address`` is.

    Raises:
        LaunchError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, _ANY_PORT))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise LaunchError(f"there is no way to it: {why}", where=address) from None
        return str(asking.getsockname()[0])


def interface_towards(address: str) -> str:
    """The name of the network interface by which ``address`` is reached."""
    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == own for found in addresses):
            return name
    raise LaunchError("no network interface has this address", where=own)


def check_own_name(address: str) -> None:
    """Refuses a host whose name is its loopback address to itself.

    Horovod 0.28.1 forgets the interface that it was given where it connects the workers
    of a set (gloo_context.cc), and takes the address of the host's name instead.

    Args:
        address: that by which the other hosts reach this one.

    Raises:
        LaunchError: the others could not reach its workers.
    """
    if _is_loopback(address):
        return  # the workers are all here
    name = socket.gethostname()
    try:
        known = socket.gethostbyname(name)
    except OSError:
        known = "not known"
    if known == "not known" or _is_loopback(known):
        raise LaunchError(
            f"to itself the host {name} is {known}: Horovod tells that to the other "
            f"hosts. Its line in /etc/hosts should be: {address} {name}",
            where=address,
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


class Rendezvous:
    """A key-value server for one attempt.

    Workers of another attempt must never meet these: each attempt has its own, with
    nothing in it.

    Args:
        addresses: of the hosts whose workers meet here, empty for this one; nobody
            else is answered. Without others it cannot be reached from outside at all.
    """

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        others = [address for address in addresses if address]
        self.address = address_towards(others[0]) if others else _LOCAL
        check_own_name(self.address)
        try:
            self._server = _Server((self.address, 0), _Handler)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise LaunchError(
                f"no place for the workers to meet at: {why}", where=self.address
            ) from None
        self._server.welcome = {*others, self.address}
        self._interface = interface_towards(self.address)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="oomrun-rendezvous", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def environment(self, rank: int, hosts: Sequence[str]) -> dict[str, str]:
        """The variables of a worker.

        Args:
            rank: which one.
            hosts: for each worker the host that it is on; those of one host follow
                each other.
        """
        host = hosts[rank]
        local = hosts[:rank].count(host)
        # On the other hosts, the workers with the same number.
        across = [h for h in dict.fromkeys(hosts) if hosts.count(h) > local]
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            MEETING: self.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            # On another host that is found there.
            INTERFACE: self._interface,
            # A worker may take longer than the 30 s that are the default: to recover
            # from an exhaustion, for one. That one has died, or hangs, we see.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_PATIENCE_S),
            "HOROVOD_HOSTNAME": host or "localhost",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(hosts)),
            "HOROVOD_LOCAL_RANK": str(local),
            "HOROVOD_LOCAL_SIZE": str(hosts.count(host)),
            "HOROVOD_CROSS_RANK": str(across.index(host)),
            "HOROVOD_CROSS_SIZE": str(len(across)),
        }

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # all workers come at once

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values: dict[str, bytes] = {}
        self.welcome: set[str] = set()

    def verify_request(self, _request: Any, client_address: Any) -> bool:
        """Whether it comes from a host of the job."""
        return client_address[0] in self.welcome


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
