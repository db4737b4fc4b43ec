"""The journal: every event of a run, one JSON object a line, only ever appended.

Covers: appending so that what was acknowledged is on disk, and reading back what a
dead writer left. Does not cover: what events mean (``core.events``, ``core.state``).

One process writes, the one that holds the run's lock. Anyone may read at any time.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.errors import JournalError

__all__ = ["Follower", "Journal", "read"]


class Journal:
    """The writing end. Opening it cuts off a line that a dead writer left half done.

    Attributes:
        path: the file.
        events: what it held when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the journal at ``path``.

        Raises:
            JournalError: it cannot be opened, or a line before the last is damaged.
        """
        self.path = path
        new = not path.exists()
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise JournalError(
                f"cannot be opened: {_why(error)}", where=str(path)
            ) from None
        try:
            if new:
                _sync_folder(path.parent)
            self.events, self._size = _parse(path, path.read_bytes())
            if os.fstat(self._descriptor).st_size > self._size:
                os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            os.close(self._descriptor)
            raise _unreadable(path, error) from None
        except JournalError:
            os.close(self._descriptor)
            raise

    def append(self, event: ev.Event) -> None:
        """Writes ``event`` as one line; it is on disk when this returns.

        Raises:
            JournalError: it could not be written. No half line is left where the
                file system lets us take it back, and the journal stays usable.
        """
        text = json.dumps(
            event_json.to_json(event), allow_nan=False, separators=(",", ":")
        )
        line = text.encode() + b"\n"
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._take_back()
            raise JournalError(
                f"cannot be written: {_why(error)}",
                where=str(self.path),
                hint="what was recorded so far is safe; once this is mended, the same "
                "command goes on from there",
            ) from None
        self._size += len(line)

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            # A reader skips the half line, and the next writer cuts it off.
            return

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(path: Path) -> list[ev.Event]:
    """The events in the journal at ``path``; none where there is no journal.

    A torn last line is what a writer that was killed leaves, or one that is writing
    at this moment, and is left out.

    Raises:
        JournalError: the file cannot be read, or a line before the last is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path, error) from None
    return _parse(path, content)[0]


class Follower:
    """Reads a journal as it grows, each line once; for those who watch a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def news(self) -> tuple[list[ev.Event], bool]:
        """The events since the last call, and whether they are another run's.

        Another run's are those of a journal that was put in the place of the old one
        (``--fresh``): all of its events are new then.

        Raises:
            JournalError: the file cannot be read, or a line is damaged.
        """
        try:
            with open(self._path, "rb", opener=_never_waiting) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise JournalError("is no file", where=str(self._path))
                identity = (status.st_dev, status.st_ino)
                another = identity != self._file or status.st_size < self._offset
                if another:
                    self._file, self._offset = identity, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise _unreadable(self._path, error) from None
        found, whole = _parse(self._path, content)
        self._offset += whole
        return found, another


def _parse(path: Path, content: bytes) -> tuple[list[ev.Event], int]:
    """The events and the length in bytes of the part that is whole."""
    found: list[ev.Event] = []
    whole = 0
    for number, line, last in _lines(content):
        if not line.endswith(b"\n"):
            break
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if last:
                break
            raise JournalError(
                "this line is damaged, and it is not the last one",
                where=f"{path}:{number}",
                hint="something other than oomrun changed the file",
            ) from None
        try:
            found.append(event_json.from_json(value))
        except event_json.MalformedEventError as error:
            raise JournalError(
                f"no event of oomrun: {error}", where=f"{path}:{number}"
            ) from None
        whole += len(line)
    return found, whole


def _never_waiting(path: str, flags: int) -> int:
    """Opens a pipe that somebody put there without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _lines(content: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Line number from 1, the line with its end, whether it is the last."""
    start, number = 0, 1
    while start < len(content):
        end = content.find(b"\n", start) + 1 or len(content)
        yield number, content[start:end], end == len(content)
        start, number = end, number + 1


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> JournalError:
    return JournalError(f"cannot be read: {_why(error)}", where=str(path))


def _why(error: OSError) -> str:
    """The system's words without the number and the path, which we give ourselves."""
    return (error.strerror or str(error)).lower()
