"""Being asked to stop: by a signal, noticed by whoever waits.

Covers: remembering the first signal, waking a ``select``, the exit code. Does not
cover: what stopping means (``attempts``). Handlers are installed by the command line
and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["STOPPED_EXIT_CODE", "Stops"]

#: Stopped and resumable, as sysexits' EX_TEMPFAIL says.
STOPPED_EXIT_CODE = 75


class Stops:
    """A request to stop, which may be made more urgent.

    Attributes:
        number: the first signal, None while there was none.
        urgent: asked again from the keyboard: do not wait for anything.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.urgent = False
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def requested(self) -> bool:
        """Whether we were asked to stop."""
        return self.number is not None

    @property
    def reason(self) -> str:
        """The signal's name."""
        return signal.Signals(self.number).name if self.number is not None else ""

    @property
    def exit_code(self) -> int:
        """75 for SIGTERM, which asks to be resumed; 128+n as shells count otherwise."""
        if self.number in (None, signal.SIGTERM):
            return STOPPED_EXIT_CODE
        return 128 + self.number

    def request(self, number: int, _frame: FrameType | None = None) -> None:
        """Asks to stop; this is a signal handler."""
        # A scheduler may send SIGTERM to a process and again to its group; only a
        # person who presses Ctrl-C twice means it.
        self.urgent = self.urgent or (self.requested and number == signal.SIGINT)
        if self.number is None:
            self.number = number
        with contextlib.suppress(BlockingIOError):
            os.write(self._writable, b"!")

    def fileno(self) -> int:
        """Readable after a request, until ``clear``."""
        return self._readable

    def clear(self) -> None:
        """Lets the next ``select`` wait again; the request itself stays."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)

    def sleep(self, seconds: float) -> None:
        """Sleeps, but not on when asked to stop."""
        if not self.requested and seconds > 0:
            select.select([self._readable], [], [], seconds)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Stops]:
        """Handles SIGTERM, SIGINT and SIGHUP meanwhile. Main thread only.

        Once asked to stop, the process is about to exit and stays deaf to them: a
        signal that comes again must not replace the exit code by its own.
        """
        before = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup ignores SIGHUP for us, and it stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self.request)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.requested else handler)

    def close(self) -> None:
        """Closes the pipe; no request may come any more."""
        os.close(self._readable)
        os.close(self._writable)
