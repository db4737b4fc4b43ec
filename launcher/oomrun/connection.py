"""A TCP connection between two hosts of a gang, a JSON object a line each way.

Covers: reading without waiting, noticing that the other side is gone, also where its
machine has just been switched off. Does not cover: what is said (``gang``, ``member``).

Each side sends something every half a second. So there is always something that the
other machine's kernel has to confirm, and where it does not for 5 s, ours closes the
connection. A machine that is merely busy, or a process that is, does confirm.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

from oomrun.channel import Lines, encode

__all__ = ["Connection"]

_CHUNK_BYTES = 64 * 1024
_UNREAD_CHUNKS = 16  # more is no part of any conversation
_SEND_S = 30.0
# Long enough for a switch that starts anew or a link that is lost for a moment.
_UNCONFIRMED_S = 5
_BEAT_S = 0.5
_BEAT = b"{}\n"
_OPTIONS = {"TCP_USER_TIMEOUT": _UNCONFIRMED_S * 1000,
            # Where no more fits into the other side's buffer, nothing is sent.
            "TCP_KEEPIDLE": _UNCONFIRMED_S, "TCP_KEEPINTVL": 1,
            "TCP_KEEPCNT": _UNCONFIRMED_S}  # fmt: skip


class Connection:
    """One side of it.

    Attributes:
        open: nothing has shown yet that the other side is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.open = True
        self._socket = sock
        self._lines = Lines()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # Held for whole lines, and to close: then its number may be another file's.
        self._sending = threading.RLock()
        self._closed = threading.Event()
        threading.Thread(
            target=self._keep_sending, name="oomrun-beat", daemon=True
        ).start()

    @property
    def socket(self) -> socket.socket:
        """Readable when there is something to ``read``, or the end."""
        return self._socket

    @property
    def own_address(self) -> str:
        """Where the other side finds us."""
        return str(self._socket.getsockname()[0])

    @property
    def their_address(self) -> str:
        """Where we find the other side."""
        return str(self._socket.getpeername()[0])

    def read(self) -> list[Any]:
        """All JSON values that have arrived; never blocks."""
        values: list[Any] = []
        while self.open:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                chunk = b""
            self.open = bool(chunk)
            values += [value for value in self._lines.feed(chunk) if value != {}]
        return values

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message; False where the other side is gone."""
        with self._sending:
            if self.open:
                try:
                    self._send_all(memoryview(encode(message)))
                except OSError:
                    # Half a line may be on its way: nothing sensible can follow it.
                    self.close()
            return self.open

    def _keep_sending(self) -> None:
        while not self._closed.wait(_BEAT_S):
            # Whoever holds it is sending anyway.
            if not self._sending.acquire(blocking=False):
                continue
            try:
                # It is writable where there is room for far more than a beat.
                if self.open and select.select([], [self._socket], [], 0)[1]:
                    self._socket.send(_BEAT)
            except (OSError, ValueError):
                continue  # whoever reads next sees it
            finally:
                self._sending.release()

    def _send_all(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not select.select([], [self._socket], [], _SEND_S)[1]:
                    raise TimeoutError("the other side takes nothing") from None

    def close(self) -> None:
        """Closes it. A second call does nothing."""
        self._closed.set()
        with self._sending:
            self.open = False
            with contextlib.suppress(OSError):
                # What is left unread would make the kernel break the connection off,
                # with whatever is still on its way.
                for _ in range(_UNREAD_CHUNKS):
                    self._socket.recv(_CHUNK_BYTES)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
