"""Worker processes: started, listened to, and ended without a trace.

Covers: one worker in its own process group with a socket to us; reading its events
and whatever else comes down that socket; ending the group; finding whatever left the
group. Does not cover: when to end what (``attempts``), what a worker does.

Linux only, as TensorFlow on GPUs is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from oomrun.channel import Lines, encode
from oomrun.core.errors import LaunchError
from oomrun.core.launch import CHANNEL_FD, RUN_TOKEN

__all__ = [
    "SPARED", "Ended", "Worker", "become_subreaper", "kill_descendants", "sweep",
]  # fmt: skip

#: Environment variable: of the process, by its id, whose ``sweep`` spares this one.
SPARED = "OOMRUN_SPARED_BY"

_PR_SET_CHILD_SUBREAPER = 36
_CHUNK_BYTES = 64 * 1024
# What a Unix socket's buffers can hold once all writers are dead; more than that means
# that somebody is still writing, whom nothing will ever stop.
_DRAIN_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: one of the two is None, or both where it was lost.

    Attributes:
        lost: where it was, if that place is gone and nobody saw it end.
    """

    exit_code: int | None
    signal: int | None
    lost: str = ""


class Worker:
    """One worker process, the leader of its own session and process group.

    Start it from the main thread: the worker asks the kernel to die with the *thread*
    that started it.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        """Starts the program.

        Args:
            argv: the program and its arguments.
            env: its whole environment; the number of the socket is added.
            log: the file that all it prints is appended to.
            cwd: the folder it starts in.

        Raises:
            LaunchError: it could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, open(log, "ab") as output:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**env, CHANNEL_FD: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            ours.close()
            why = getattr(error, "strerror", None) or str(error)
            raise LaunchError(
                f"the worker could not be started: {why.lower()}", where=argv[0]
            ) from None
        ours.setblocking(False)
        self._socket = ours
        self._lines = Lines()
        self._open = True
        self._ended: Ended | None = None
        self._exit_fd = _exit_descriptor(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def channel(self) -> socket.socket | None:
        """Readable when there is something to ``read``; None once it is closed."""
        return self._socket if self._open else None

    @property
    def exit_fd(self) -> int | None:
        """Readable when the process has ended; None where the kernel has no pidfd."""
        return self._exit_fd

    @property
    def oom_kills(self) -> int:
        """Kills that were counted elsewhere: those of this machine are seen here."""
        return 0

    @property
    def skipped(self) -> int:
        """Lines that came down the socket and were no messages."""
        return self._lines.skipped

    def read(self) -> list[Any]:
        """The JSON values that have arrived; never blocks, reads 64 KiB at most."""
        if not self._open:
            return []
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self._open = False
        return self._lines.feed(chunk)

    def drain(self) -> list[Any]:
        """All that is left to read once the worker and its children are dead."""
        values: list[Any] = []
        for _ in range(_DRAIN_BYTES // _CHUNK_BYTES):
            before = self._lines.bytes_fed
            values += self.read()
            if self._lines.bytes_fed == before:
                break
        return values

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message; False where the worker cannot take it any more."""
        if not self._open:
            return False
        try:
            # A message is far shorter than the socket's buffer; where even that is
            # full, the worker reads nothing and has to be ended anyway.
            line = encode(message)
            return self._socket.send(line, socket.MSG_NOSIGNAL) == len(line)
        except OSError:
            return False

    def exited(self) -> bool:
        """Whether the process has ended. It stays a zombie until ``finish``."""
        return self.ending() is not None

    def ending(self) -> Ended | None:
        """How the process has ended, still a zombie; None while it lives."""
        if self._ended is not None:
            return self._ended
        # Not Popen.poll, which reaps: the group's number is safe to send signals to
        # only while its leader is there, be it as a zombie.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, self.pid, flags)
        if found is None:
            return None
        if found.si_code == os.CLD_EXITED:
            return Ended(exit_code=found.si_status, signal=None)
        return Ended(exit_code=None, signal=found.si_status)

    def signal_process(self, number: int) -> None:
        """Sends a signal to the process alone."""
        if not self.exited():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and all that stayed in its group."""
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def finish(self) -> Ended:
        """Kills what is left of the group, reaps the process, says how it ended."""
        self.signal_group(signal.SIGKILL)
        code = self._process.wait()
        if code < 0:
            self._ended = Ended(exit_code=None, signal=-code)
        else:
            self._ended = Ended(exit_code=code, signal=None)
        return self._ended

    def close(self) -> None:
        """Closes our ends. Before ``finish`` a worker would take us for dead."""
        self._open = False
        self._socket.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None


def _exit_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def become_subreaper() -> None:
    """Makes orphans among our descendants our children, so that ``sweep`` sees them.

    Only for a process that has no children but workers.
    """
    # Where the kernel refuses, sweep still knows processes by their environment.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def sweep(run_id: str, *, descendants: bool = False) -> list[int]:
    """Kills every process that a run has left behind, and waits for each to be gone.

    They are known by the run's id in their environment, which children inherit
    however far they go from their parents' group and session.

    Args:
        run_id: the run; "" finds none.
        descendants: also kill whatever is our own descendant. Only for a process
            that has no children but workers.

    Returns:
        The processes' ids.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    killed: list[int] = []
    # A process may fork between being listed and being killed.
    for _ in range(10):
        found = [p for p in _leftovers(run_id, descendants) if p.pid not in spared]
        if not found:
            break
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        psutil.wait_procs(found, timeout=5.0)
        killed += [process.pid for process in found]
    if descendants:
        _reap()
    return list(dict.fromkeys(killed))


def kill_descendants() -> None:
    """Kills all our descendants, and reaps none: for whoever then ends at once.

    Another thread may wait for one of them. Had we taken its status, Python would say
    there that it ended with exit code 0.
    """
    for _ in range(10):
        found = _leftovers("", descendants=True)
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        until = time.monotonic() + 5.0
        while any(map(_alive, found)) and time.monotonic() < until:
            time.sleep(0.01)


def _leftovers(run_id: str, descendants: bool) -> list[psutil.Process]:
    own = os.geteuid()
    found = psutil.Process().children(recursive=True) if descendants else []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get(RUN_TOKEN) == run_id != ""
            if ours and process.uids().real == own:
                found.append(process)
    return [p for p in found if _alive(p) and not _spared(p)]


def _spared(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(SPARED) == str(os.getpid())
    return False


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _reap() -> None:
    """Reaps orphans that ended as our children."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
