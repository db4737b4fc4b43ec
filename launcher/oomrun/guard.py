"""The process between the supervisor and a command, which may be any program.

Covers: starting the program, telling the supervisor that it runs, passing SIGTERM on,
ending as it ended, and leaving nothing behind when the supervisor is gone. Does not
cover: what its end means (``core.diagnosis``).

A program that is not ours cannot be asked to watch its parent. The kernel's signal at a
parent's death reaches one process only, not the children of a shell script. So this one
holds the channel, whose closing says that the supervisor is gone, adopts whatever the
program leaves behind (it is a subreaper), and kills it all. Should this process itself
be killed, the kernel ends the program, and the supervisor the rest of the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import psutil

from oomrun.channel import Lines, encode
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core import launch as launches
from oomrun.core.launch import Launch
from oomrun.processes import become_subreaper, sweep

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_CHUNK_BYTES = 4096
_EXIT_NOT_STARTED = 127  # as shells say it


def main() -> int:
    """Runs one program to its end; the supervisor has set the environment up."""
    began = time.monotonic()
    with open(os.environ.pop(launches.LAUNCH_FILE), encoding="utf-8") as file:
        settings = launches.from_json(json.load(file))
    channel = socket.socket(fileno=int(os.environ.pop(launches.CHANNEL_FD)))
    os.set_inheritable(channel.fileno(), False)
    become_subreaper()
    woken = _wake_on_children()
    program = _start(settings)
    if program is None:
        return _EXIT_NOT_STARTED
    _report(channel, settings, program.pid, time.monotonic() - began)
    code = _Guard(settings, channel, woken, program).watch()
    if code < 0:
        _die_of(-code)
    return code


def _wake_on_children() -> socket.socket:
    """A socket that is readable after a child's end; SIGTERM is for the program."""
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    # Handlers, since what is ignored stays ignored in the program.
    signal.signal(signal.SIGCHLD, _nothing)
    signal.signal(signal.SIGTERM, _nothing)
    signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
    return woken


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Only wakes us up."""


def _start(settings: Launch) -> subprocess.Popen[bytes] | None:
    us = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_us() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != us:
            os._exit(1)

    try:
        return subprocess.Popen(
            [settings.program, *settings.args], preexec_fn=die_with_us
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or str(error)
        print(f"oomrun: {settings.program}: {why}", file=sys.stderr, flush=True)
        return None


def _report(channel: socket.socket, settings: Launch, pid: int, start_s: float) -> None:
    """Tells the supervisor that the program runs."""
    ready = ev.WorkerReady(
        at=time.time(), attempt=settings.attempt, rank=settings.rank, pid=pid,
        tensorflow="", keras="", start_s=start_s,
    )  # fmt: skip
    running = ev.PhaseChanged(
        at=time.time(), attempt=settings.attempt, phase="training"
    )
    with contextlib.suppress(OSError):  # nobody listens: the next read tells
        for event in (ready, running):
            channel.sendall(encode(event_json.to_json(event)))


class _Guard:
    """Waits for the program, the supervisor and what the program leaves, at once."""

    def __init__(
        self,
        settings: Launch,
        channel: socket.socket,
        woken: socket.socket,
        program: subprocess.Popen[bytes],
    ) -> None:
        self._run_id = settings.run_id
        self._channel = channel
        self._woken = woken
        self._program = program
        self._lines = Lines()
        self._stopping = False
        self._told: set[int] = set()

    def watch(self) -> int:
        """Until the program has ended; its return code, negative for a signal.

        Once it was told to stop, also until all have ended that it left behind: a
        shell dies of SIGTERM at once, and what it ran may be writing a checkpoint.
        """
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            code = self._program.poll()
            children = self._children() if self._stopping else []
            if code is not None and not children:
                return code
            self._tell(children)
            self._reap_adopted()
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(_CHUNK_BYTES)
            self._listen()

    def _children(self) -> list[psutil.Process]:
        """Our living children: the program, then what its ended processes left."""
        alive = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    alive.append(child)
        return alive

    def _reap_adopted(self) -> None:
        """Reaps what ended as our child, but for the program, whose code we want."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, flags):
                if ended.si_pid == self._program.pid:
                    return
                os.waitpid(ended.si_pid, 0)

    def _tell(self, children: list[psutil.Process]) -> None:
        """Sends SIGTERM to each child once.

        Not to the whole group: a program's own helpers must not be gone when it
        writes its checkpoint.
        """
        for child in children:
            if child.pid not in self._told:
                self._told.add(child.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate()

    def _listen(self) -> None:
        """Takes the supervisor's messages; ends everything when it is gone."""
        try:
            chunk = self._channel.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._end_all()
        for message in self._lines.feed(chunk):
            if message.get("do") == launches.STOP:
                self._stopping = True

    def _end_all(self) -> None:
        sweep(self._run_id, descendants=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _die_of(number: int) -> None:
    """Ends by the program's signal, for the supervisor to see; leaves no core file."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
