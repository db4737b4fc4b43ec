"""A run's folder: every path in it, its lock, and the one way to write a whole file.

Covers: where things are, atomic writes, one supervisor per run, setting an old run
aside. Does not cover: what the files say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oomrun.core import status
from oomrun.core.errors import PlatformError

__all__ = ["AttemptDir", "RunDir", "set_aside", "write_atomically"]


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The folder of one attempt."""

    path: Path

    def launch(self, rank: int = 0) -> Path:
        """What the worker of this rank was told."""
        return self.path / ("launch.json" if rank == 0 else f"launch-{rank}.json")

    @property
    def plan(self) -> Path:
        """The plan alone, as ``oomrun plan --json`` prints it."""
        return self.path / "plan.json"

    def log(self, rank: int = 0) -> Path:
        """All that the worker of this rank printed."""
        return self.path / f"rank-{rank}.log"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run; the only place that knows what is where in it."""

    path: Path

    @property
    def job_file(self) -> Path:
        """The job file as it was run."""
        return self.path / "job.yaml"

    @property
    def journal(self) -> Path:
        """Every event of the run."""
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """Locked by the supervisor of the run, and holds its pid."""
        return self.path / "lock"

    @property
    def key(self) -> Path:
        """By which the hosts of the run know each other; for its owner alone."""
        return self.path / "key"

    @property
    def host_memory(self) -> Path:
        """How full the host's memory is; gone where its supervisor ended by itself."""
        return self.path / "host-memory.json"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless the job file names another folder."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """The run's report for a browser."""
        return self.path / "report.html"

    @property
    def attempts(self) -> Path:
        """Holds a folder for each attempt."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        """The folder of attempt ``number``, from 1."""
        return AttemptDir(self.attempts / f"{number:04d}")

    def oom_report(self, attempt: int, number: int) -> Path:
        """The report of the run's ``number``-th exhaustion, in ``attempt``."""
        return self.path / status.oom_report_path(attempt, number)

    def create(self) -> None:
        """Makes the folder.

        Raises:
            PlatformError: it cannot be made or is no folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed("cannot be made", self.path, error) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run's lock; the folder must exist.

        The lock is the kernel's and ends with its process, so that nothing is stale
        after a SIGKILL. Workers do not inherit it.

        Raises:
            PlatformError: another supervisor holds it, or it cannot be had.
        """
        descriptor = self._take_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _take_lock(self) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.lock, flags, 0o644)
        except OSError as error:
            raise _failed("cannot be opened", self.lock, error) from None
        try:
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise PlatformError(
                f"another oomrun is running this (pid {holder or 'unknown'})",
                where=str(self.path),
                hint="wait for it, stop it, or choose another --run-dir",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise _failed("cannot be locked", self.lock, error) from None
        return descriptor


def _lock(descriptor: int) -> None:
    """Takes the lock, or raises BlockingIOError after a fifth of a second.

    Not at once: ``oomrun status`` asks for the lock too, and has it for a moment.
    """
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.01)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def set_aside(path: Path) -> Path:
    """Renames a folder to the first free ``<name>.1``, ``<name>.2`` … and returns that.

    Of a link the folder is renamed that it leads to, and the link leads to a new one:
    a disk that somebody has chosen stays the one that is written to.

    Raises:
        PlatformError: it cannot be renamed.
    """
    linked = path.is_symlink()
    path = path.resolve() if linked else path
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    try:
        path.rename(target)
        if linked:
            path.mkdir()
    except OSError as error:
        raise _failed(f"cannot be renamed to {target}", path, error) from None
    return target


def write_atomically(path: Path, content: bytes) -> None:
    """Writes the file so that it is there whole, or as before, even after a crash.

    Raises:
        PlatformError: it cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _failed("cannot be written", path, error) from None


def _failed(what: str, path: Path, error: OSError) -> PlatformError:
    """The system's words without the path, which ``where`` gives."""
    why = (error.strerror or str(error)).lower()
    return PlatformError(f"{what}: {why}", where=str(path))
