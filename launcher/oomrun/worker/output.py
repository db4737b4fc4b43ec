"""What the script prints, where its log's disk takes no more: lost, and said once.

Covers: Python's standard output and error, which go to the worker's log. Does not
cover: what libraries write there themselves, who do not look whether it was written.

A progress bar that cannot be written must not end a training of days.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from oomrun.core import events as ev
from oomrun.worker.channel import Channel

__all__ = ["keep_going"]

# What a disk says. A closed pipe or descriptor is the script's own affair.
_OF_DISKS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
)


class _Lossy(io.RawIOBase):
    """A file whose disk may refuse what is written.

    Args:
        raw: the file.
        lost: called with the disk's words, each time.
    """

    def __init__(self, raw: Any, lost: Callable[[str], None]) -> None:
        self._raw, self._lost = raw, lost

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    @property
    def name(self) -> Any:
        """The file's, as Python names its own streams."""
        return self._raw.name

    @property
    def mode(self) -> Any:
        """The file's."""
        return self._raw.mode

    def write(self, content: Any) -> int:
        """All of it, or as if it were."""
        rest = memoryview(content).cast("B")
        size = rest.nbytes
        try:
            while rest:
                # A disk that is nearly full takes a part, and then says so.
                written = self._raw.write(rest)
                if written is None:
                    break
                rest = rest[written:]
        except OSError as error:
            if error.errno not in _OF_DISKS:
                raise
            self._lost(error.strerror or str(error))
            return size
        return size - rest.nbytes


def keep_going(channel: Channel, attempt: int) -> None:
    """From now on nothing fails that prints, whatever the log's disk says.

    Args:
        channel: is told the first time.
        attempt: its number.
    """
    said, own = False, os.getpid()

    def lost(why: str) -> None:
        nonlocal said
        # A process that was forked off this one has no channel.
        if said or os.getpid() != own:
            return
        said = True
        text = (
            f"the worker's log cannot be written ({why}): what the script prints is "
            "lost from here on, and training goes on"
        )
        channel.send(
            ev.Noted(at=time.time(), attempt=attempt, code="log-lost", text=text)
        )

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            made = _over(stream, lost)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)


def _over(stream: io.TextIOWrapper, lost: Callable[[str], None]) -> TextIO:
    """A stream like this one, over a file that may refuse."""
    stream.flush()
    encoding, errors = stream.encoding, stream.errors
    lines, through = stream.line_buffering, stream.write_through
    buffer: Any = stream.detach()
    if isinstance(buffer, io.BufferedWriter):
        whole: Any = io.BufferedWriter(_Lossy(buffer.detach(), lost))
    else:  # PYTHONUNBUFFERED
        whole = _Lossy(buffer, lost)
    return io.TextIOWrapper(
        whole, encoding, errors, line_buffering=lines, write_through=through
    )
