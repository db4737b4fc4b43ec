"""Keys as they are pressed, from a terminal.

Covers: turning the terminal's line editing off and on again, names of keys. Does not
cover: what they do.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

__all__ = ["Keys"]

_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down",
    "\x1b[C": "enter", "\x1bOC": "enter", "\x1b[D": "escape", "\x1bOD": "escape",
    "\x1b": "escape", "\r": "enter", "\n": "enter",
}  # fmt: skip


class Keys:
    """The keys of stdin, where it is a terminal; else there never is one.

    Ctrl-C and ctrl-Z stay what they are.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._before: Any = None

    def __enter__(self) -> Keys:
        if sys.stdin is not None and sys.stdin.isatty():
            self._descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def pressed(self, within_s: float) -> list[str]:
        """The keys of the next moment: at once where there are some, else in time.

        Raises:
            EOFError: the terminal has gone.
        """
        if self._before is None:
            time.sleep(within_s)
            return []
        try:
            if termios.tcgetattr(self._descriptor)[3] & termios.ICANON:
                tty.setcbreak(self._descriptor)  # a shell has changed it, after ctrl-Z
            if not select.select([self._descriptor], [], [], within_s)[0]:
                return []
            typed = os.read(self._descriptor, 1024).decode(errors="replace")
        except (OSError, termios.error):
            raise EOFError from None
        if not typed:
            raise EOFError
        if typed in _NAMES:
            return [_NAMES[typed]]
        return _split(typed)


def _split(typed: str) -> list[str]:
    found = []
    while typed:
        length = 3 if typed[:3] in _NAMES else 1
        found.append(_NAMES.get(typed[:length], typed[:length]))
        typed = typed[length:]
    return found
