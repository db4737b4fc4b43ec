"""The live view: draws ``frame`` on a terminal, a few times a second at most.

Covers: when it is drawn, the terminal's size, what happens when it goes away. Does not
cover: what is drawn (``frame.py``).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live

from oomrun.cli.frame import History, frame
from oomrun.cli.glyphs import ASCII, UNICODE
from oomrun.core import events as ev
from oomrun.core.state import JobState

__all__ = ["LiveView", "TerminalConsole", "is_unicode", "terminal_size"]

_SHORTEST_PAUSE_S = 0.5  # a picture of eight devices costs 10 ms: 2 % of a core
_IDLE_S = 1.0  # the clock on the picture goes on between events


class TerminalConsole(Console):
    """A console that a closed terminal does not end."""

    def on_broken_pipe(self) -> None:
        """Raises, where rich would end the program, and with it the run."""
        raise BrokenPipeError


class LiveView:
    """Draws in a thread of its own, so that a slow terminal cannot slow the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._glyphs = UNICODE if is_unicode(stream) else ASCII
        # rich would look at the sizes of stdin and stderr too, which may be others.
        columns, rows = terminal_size(stream)
        self._console = TerminalConsole(
            file=stream, width=columns, height=rows, highlight=False
        )
        self._live = Live(
            console=self._console, auto_refresh=False, vertical_overflow="crop"
        )
        self._lock = threading.Lock()
        self._state = JobState()
        self._history = History()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._gone = False
        self._thread = threading.Thread(
            target=self._keep_drawing, name="oomrun-live-view", daemon=True
        )

    def __call__(self, state: JobState, event: ev.Event) -> None:
        with self._lock:
            self._state = state
            self._history.add(state, event)
        self._news.set()

    def __enter__(self) -> LiveView:
        try:
            self._live.start()
        except (OSError, ValueError):
            self._gone = True
        else:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the last picture on the terminal."""
        if self._gone:
            return
        self._stopping.set()
        self._news.set()
        # A terminal that was stopped with ctrl-S never takes the last picture.
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._draw()
            self._end()

    def _end(self) -> None:
        try:
            self._live.stop()
        except (OSError, ValueError):
            self._gone = True

    def _keep_drawing(self) -> None:
        while not self._stopping.is_set() and not self._gone:
            self._news.wait(_IDLE_S)
            self._news.clear()
            self._draw()
            self._stopping.wait(_SHORTEST_PAUSE_S)

    def _draw(self) -> None:
        if self._gone:
            return
        try:
            columns, rows = self._fit()
            with self._lock:
                lines = frame(
                    self._state, self._history, width=columns, height=rows - 1,
                    now=time.time(), glyphs=self._glyphs,
                )  # fmt: skip
            self._live.update(Group(*lines), refresh=True)
        except (OSError, ValueError):
            # The terminal was closed; the run goes on without being watched.
            self._gone = True

    def _fit(self) -> tuple[int, int]:
        """The terminal's size now; where it became narrower, starts on a clean page."""
        columns, rows = terminal_size(self._stream)
        before = self._console.size
        if (columns, rows) != (before.width, before.height):
            self._console.size = type(before)(columns, rows)
        if columns < before.width:
            # The terminal has broken our lines, and rich would go up too few of them.
            self._console.control(Control.home(), Control.clear())
        return columns, rows


def is_unicode(stream: TextIO) -> bool:
    """Whether the characters of pictures can be written to ``stream``."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        "█┃━▁×·".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows, at this moment."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = shutil.get_terminal_size()
    # A terminal that does not know its size says 0.
    return columns or 80, rows or 24
