"""A program on a pseudo terminal, looked at and typed to.

Covers: starting it, its screen, keys, another size, hanging up. Does not cover: checks.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest

__all__ = ["Terminal"]


class Terminal:
    """A program on a pseudo terminal, and what its screen shows."""

    def __init__(
        self,
        columns: int,
        rows: int,
        argv: list[str],
        cwd: Path | None = None,
        **env: str,
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.received = b""
        self._stream = pyte.ByteStream(self.screen)
        self._fd, inner = pty.openpty()
        self._set_size(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=cwd,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={
                **os.environ,
                "TERM": "xterm-256color",
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "PYTHONIOENCODING": "utf-8",
                **env,
            },
        )
        os.close(inner)

    def _set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def resize(self, columns: int, rows: int) -> None:
        """As if somebody dragged the window's corner."""
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def until(self, text: str, timeout_s: float = 30) -> list[str]:
        """The screen's lines, once one of them holds ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in "\n".join(self.screen.display):
            left = deadline - time.monotonic()
            if left < 0 or not self._read(left):
                shown = "\n".join(self.screen.display)
                pytest.fail(f"{text!r} did not appear on:\n{shown}")
        return self.lines()

    def lines(self) -> list[str]:
        """The screen's lines."""
        return [line.rstrip() for line in self.screen.display]

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has ended
            return False
        self.received += data
        self._stream.feed(data)
        return bool(data)

    def enter(self) -> None:
        """Presses the key."""
        self.type(b"\n")

    def type(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._fd, keys)

    def edits_lines(self) -> bool:
        """Whether the terminal hands lines over, as it does for a shell."""
        return bool(termios.tcgetattr(self._fd)[3] & termios.ICANON)

    def end(self) -> int:
        """Reads to the end."""
        while self._read(30):
            pass
        return self.process.wait(30)

    def edit_lines(self) -> None:
        """Sets the terminal so."""
        settings = termios.tcgetattr(self._fd)
        settings[3] |= termios.ICANON
        termios.tcsetattr(self._fd, termios.TCSANOW, settings)

    def until_keys(self, timeout_s: float = 30) -> None:
        """Waits until it hands single keys over."""
        deadline = time.monotonic() + timeout_s
        while self.edits_lines():
            assert time.monotonic() < deadline, "the terminal edits lines"
            time.sleep(0.05)

    def hang_up(self) -> None:
        """Closes the window."""
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        """Ends the program if it still runs."""
        if self._fd >= 0:
            self.hang_up()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
