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
import threading
from http import HTTPStatus
from typing import Any

from oomrun.core.errors import LaunchError

__all__ = ["Rendezvous"]

_LOCAL = "127.0.0.1"
_LARGEST_VALUE = 1024 * 1024
_PATIENCE_S = 24 * 3600


class Rendezvous:
    """A key-value server for one attempt, for workers of this machine only.

    Workers of another attempt must never meet these: each attempt has its own, with
    nothing in it.
    """

    def __init__(self) -> None:
        try:
            self._server = _Server((_LOCAL, 0), _Handler)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise LaunchError(
                f"no place for the workers to meet at: {why}", where=_LOCAL
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="oomrun-rendezvous", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """The variables of the worker ``rank`` of ``size``, all on this machine."""
        return {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": _LOCAL,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_GLOO_IFACE": "lo",
            # A worker may take longer than the 30 s that are the default: to recover
            # from an exhaustion, for one. That one has died, or hangs, we see.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_PATIENCE_S),
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }

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
