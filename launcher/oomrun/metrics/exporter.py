"""Serves the metrics over HTTP for as long as the run lasts.

Covers: /metrics (text or OpenMetrics, as asked for), /healthz, /readyz; finding a free
port; staying up for two scrapes after the end. Does not cover: what is measured
(``catalogue.py``), who may see it (``protection.py``).

Nothing here may hurt the run: each client has a thread of its own and a few seconds,
and there are only so many of them at a time.
"""

from __future__ import annotations

import errno
import http.server
import itertools
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry

from oomrun.core.errors import PlatformError
from oomrun.core.machine import MachineReading
from oomrun.core.state import JobState
from oomrun.metrics.catalogue import registry_of
from oomrun.metrics.exposition import Encoders
from oomrun.metrics.protection import OPEN, Protection

__all__ = ["Exporter", "ExporterError", "serve", "start"]

_FINAL_SCRAPES = 2  # see the end of a run

_PORTS_TRIED = 20
_CLIENT_TIMEOUT_S = 5.0
_MOST_CLIENTS = 32
_PLAIN = "text/plain; charset=utf-8"
_log = logging.getLogger(__name__)


class ExporterError(PlatformError):
    """The metrics cannot be served at the wanted address."""


class Exporter:
    """A running metrics endpoint.

    Attributes:
        address: host and port that it listens on.
        url: where the metrics are.
        note: what a person should know of the address, or "".
    """

    def __init__(
        self,
        server: _Server,
        registry: CollectorRegistry,
        readiness: Callable[[], str],
        protection: Protection,
    ) -> None:
        self.note = ""
        host, port = server.server_address[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        shown = f"[{self.address[0]}]" if ":" in self.address[0] else self.address[0]
        scheme = "https" if protection.tls else "http"
        self.url = f"{scheme}://{shown}:{port}/metrics"
        self._protection = protection
        self._server = server
        self._registry = registry
        self._encoders = Encoders()
        self._readiness = readiness
        self._scrapes = threading.Lock()
        self._scraped_at: deque[float] = deque(maxlen=5)
        self._ending = threading.Event()
        self._final_scrapes = threading.Semaphore(0)
        self._closed = False
        server.answer = self._answer
        self._thread = threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 0.2},  # how long closing takes at most
            name="oomrun-metrics",
            daemon=True,
        )
        self._thread.start()

    def linger(self, max_s: float) -> bool:
        """Waits for two scrapes that see the end of the run; call it after the end.

        Two, since servers come in pairs, and what was seen once only is soon stale.
        Returns at once where nobody scrapes (any more), and after two and a half of
        the scraper's own intervals at most.

        Args:
            max_s: the longest wait.

        Returns:
            Whether such scrapes have happened.
        """
        self._ending.set()
        with self._scrapes:
            times = tuple(self._scraped_at)
        now = time.monotonic()
        until = now + patience_s(times, max_s, now)
        return all(
            self._final_scrapes.acquire(timeout=max(0.0, until - time.monotonic()))
            for _ in range(_FINAL_SCRAPES)
        )

    def close(self) -> None:
        """Stops serving and frees the port. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLIENT_TIMEOUT_S)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, request: _Request) -> None:
        match request.path.partition("?")[0]:
            case "/metrics":
                if self._protection.admits(request.headers.get("Authorization", "")):
                    self._answer_scrape(request)
                else:
                    request.refuse(self._protection.scheme)
            case "/healthz":
                request.reply(HTTPStatus.OK, _PLAIN, b"ok\n")
            case "/readyz":
                state = self._readiness()
                ready = state != "pending"
                status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
                request.reply(status, _PLAIN, f"{state}\n".encode())
            case _:
                known = b"there are /metrics, /healthz and /readyz\n"
                request.reply(HTTPStatus.NOT_FOUND, _PLAIN, known)

    def _answer_scrape(self, request: _Request) -> None:
        # Read before the state is: a scrape that began before the end may not show it.
        ending = self._ending.is_set()
        counts = request.command == "GET"
        if counts:
            # Before the reply: whoever has it may end the run at once.
            with self._scrapes:
                self._scraped_at.append(time.monotonic())
        accept = request.headers.get("Accept", "")
        encode, content_type = self._encoders.choose(accept)
        request.reply(HTTPStatus.OK, content_type, encode(self._registry))
        if counts and ending:
            self._final_scrapes.release()


def patience_s(scraped_at: Sequence[float], max_s: float, now: float) -> float:
    """How long the end of a run waits for its last scrapes, in seconds.

    Args:
        scraped_at: when the last scrapes were, in seconds, the oldest first.
        max_s: the longest wait.
        now: the time, on the same clock.

    Returns:
        Two and a half of the scraper's own intervals after its last scrape at most:
        none comes to the moment. Not above 0 where nobody scrapes, or not any more.
    """
    if not scraped_at:
        return 0.0
    gaps = [later - sooner for sooner, later in itertools.pairwise(scraped_at)]
    interval = max(gaps, default=max_s / 2)
    return min(max_s, scraped_at[-1] + (_FINAL_SCRAPES + 0.5) * interval - now)


class _Request(http.server.BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so that no client keeps its thread for longer."""

    server: _Server
    timeout = _CLIENT_TIMEOUT_S
    server_version = "oomrun"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            self.server.answer(self)
        except OSError:
            # The client has gone or is too slow: its own affair.
            self.close_connection = True
        except Exception:
            _log.exception("the metrics could not be computed")
            self.reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN, b"see the log of oomrun\n"
            )

    do_HEAD = do_GET

    def reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        """Sends the whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, scheme: str) -> None:
        """Says by which scheme the client must say who it is."""
        self.send_response(HTTPStatus.UNAUTHORIZED)
        self.send_header("WWW-Authenticate", f'{scheme} realm="oomrun"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not http.server.HTTPServer, which asks the DNS for its own name when it binds.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    answer: Callable[[_Request], None]

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        super().__init__((host, port), _Request)

    def get_request(self) -> tuple[Any, Any]:
        client, address = super().get_request()
        if self._tls is None:
            return client, address
        # The handshake is the first read's, in the client's own thread: here it would
        # let one silent client keep all others waiting.
        wrapped = self._tls.wrap_socket(
            client, server_side=True, do_handshake_on_connect=False
        )
        return wrapped, address

    def process_request(self, request: Any, client_address: Any) -> None:
        # Waiting for a place would block everyone; whoever is too much is sent away.
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the metrics endpoint failed", exc_info=True)


def start(
    host: str,
    port: int,
    current_state: Callable[[], JobState],
    *,
    machine: Callable[[], MachineReading | None] = lambda: None,
    port_taken: str = "next",
    protection: Protection = OPEN,
) -> Exporter:
    """Serves the metrics of the run whose state ``current_state`` returns.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        current_state: called from other threads, at every scrape.
        machine: the same, for what the machine itself tells.
        port_taken: ``next`` takes the next free port within 20, ``error`` raises.
        protection: who may scrape.

    Raises:
        ExporterError: it cannot be had; the run can go on without.
    """
    return serve(
        host,
        port,
        registry_of(lambda: [current_state()], machine),
        readiness=lambda: current_state().state,
        port_taken=port_taken,
        protection=protection,
    )


def serve(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    readiness: Callable[[], str],
    port_taken: str = "next",
    protection: Protection = OPEN,
) -> Exporter:
    """Serves what ``registry`` collects; all else is as for ``start``.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        registry: asked at every scrape, from other threads.
        readiness: what ``/readyz`` says; ``pending`` is not ready.
        port_taken: ``next`` takes the next free port within 20, ``error`` raises.
        protection: who may scrape.

    Raises:
        ExporterError: it cannot be had.
    """
    last = port if port_taken == "error" or port == 0 else port + _PORTS_TRIED
    for candidate in range(port, min(last, 65535) + 1):
        try:
            server = _Server(host, candidate, protection.tls)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE and candidate < last:
                continue
            raise ExporterError(_refusal(host, port, candidate, error)) from None
        taken = f"port {port} is taken; " if candidate != port and port else ""
        exporter = Exporter(server, registry, readiness, protection)
        exporter.note = f"{taken}metrics are at {exporter.url}" if taken else ""
        return exporter
    raise ExporterError(f"no port from {port} to {last} is free on {host}")


def _refusal(host: str, port: int, last: int, error: Exception) -> str:
    why = (getattr(error, "strerror", None) or str(error)).lower()
    ports = f"{port}" if port == last else f"{port} to {last}"
    return f"metrics cannot be served at {host}:{ports}: {why}"
