"""A TCP connection between two hosts of a gang, a JSON object a line each way.

Covers: reading without waiting, noticing that the other side is gone, also where its
machine has just been switched off. Does not cover: what is said (``gang``, ``member``).
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping
from typing import Any

from oomrun.channel import Lines, encode

__all__ = ["Connection"]

_CHUNK_BYTES = 64 * 1024
_SEND_S = 30.0
# Half a minute of silence from a machine's kernel, and it counts as gone.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4,
              # Where something is on its way nothing else is asked: milliseconds.
              "TCP_USER_TIMEOUT": 30_000}  # fmt: skip


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
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

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
            values += self._lines.feed(chunk)
        return values

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message; False where the other side is gone."""
        if self.open:
            try:
                self._send_all(memoryview(encode(message)))
            except OSError:
                # Half a line may be on its way: nothing sensible can follow it.
                self.close()
        return self.open

    def _send_all(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not select.select([], [self._socket], [], _SEND_S)[1]:
                    raise TimeoutError("the other side takes nothing") from None

    def close(self) -> None:
        """Closes it. A second call does nothing."""
        self.open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
