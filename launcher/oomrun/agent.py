"""The process on another host between the supervisor and one worker, started over ssh.

Covers: reading on standard input what to start, starting the worker, passing on what
the two say to each other, telling how the worker ended, and leaving nothing behind when
the connection is lost. Does not cover: ssh and the supervisor's end (``hosts``).

The connection may break without a word: a cable, a frozen host. So the supervisor says
every few seconds that it is there; where it does not, it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from oomrun import devices
from oomrun.channel import encode
from oomrun.core import topology
from oomrun.core.errors import OomrunError
from oomrun.core.launch import RANK, RUN_TOKEN
from oomrun.processes import Worker, become_subreaper, sweep
from oomrun.ranks import (
    INTERFACE,
    address_towards,
    check_own_name,
    interface_towards,
)

__all__ = ["ALIVE", "ENDED", "SIGNAL", "inventory", "main"]

#: What the supervisor says: that it is there; a signal for the worker.
ALIVE, SIGNAL = "alive", "signal"
#: The key of our last line.
ENDED = "worker_has_ended"

# Ten of its messages. Less would end trainings for a network that only stutters.
_SILENCE_S = 30.0
_CHUNK_BYTES = 64 * 1024
_EXIT_LOST = 1


def inventory() -> int:
    """Prints the devices of this host as JSON."""
    print(json.dumps(topology.to_json(devices.discover(os.environ))))
    return 0


def main() -> int:
    """Runs one worker to its end."""
    # A closing connection may also say so by a signal.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    become_subreaper()
    order, rest = _order()
    _end_earlier(order["env"])
    try:
        worker = _start(order)
    except OomrunError as error:
        print(f"oomrun: {error}", file=sys.stderr, flush=True)
        return _EXIT_LOST
    threading.Thread(target=_hear, args=(worker, rest), daemon=True).start()
    while not worker.exited():
        _wait(worker)
        _pass_on(worker)
    ended = worker.finish()
    _pass_on(worker)
    sweep("", descendants=True)
    last = {ENDED: {"exit_code": ended.exit_code, "signal": ended.signal}}
    # It may have been killed in the middle of a line.
    _write(b"{}\n" + encode(last))
    return 0


def _order() -> tuple[Mapping[str, Any], bytes]:
    """The first line of standard input, and what came after it."""
    read = b""
    while b"\n" not in read:
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            raise SystemExit("oomrun: the supervisor has gone before it said anything")
        read += chunk
    line, _, rest = read.partition(b"\n")
    order: dict[str, Any] = json.loads(line)
    return order, rest


def _start(order: Mapping[str, Any]) -> Worker:
    cwd, log = Path(order["cwd"]), Path(order["log"])
    for folder in (cwd, log.parent):
        if not folder.is_dir():
            raise SystemExit(
                f"oomrun: {folder} is not on this host ({os.uname().nodename}): the "
                "job's folders must be shared, under the same paths, by all hosts"
            )
    env, meeting = {**os.environ, **order["env"]}, order["meeting_host"]
    env[INTERFACE] = interface_towards(meeting)
    check_own_name(address_towards(meeting))
    return Worker(order["argv"], env, log, cwd)


def _end_earlier(env: Mapping[str, str]) -> None:
    """Kills what an earlier attempt has left of this very worker."""
    mine = (env[RUN_TOKEN], env[RANK])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = process.environ()
            if (theirs.get(RUN_TOKEN), theirs.get(RANK)) == mine:
                process.kill()
                process.wait(5.0)


def _wait(worker: Worker) -> None:
    poll = select.poll()
    for readable in (worker.channel, worker.exit_fd):
        if readable is not None:
            poll.register(readable, select.POLLIN)
    poll.poll(1000 if worker.exit_fd is None else None)


def _pass_on(worker: Worker) -> None:
    """Passes on what the worker has said so far, byte by byte."""
    while chunk := worker.read_bytes():
        _write(chunk)


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        _leave()


def _hear(worker: Worker, rest: bytes) -> None:
    """Does what the supervisor says until it is gone."""
    heard_at = time.monotonic()
    while True:
        *lines, rest = rest.split(b"\n")
        for line in lines:
            _do(worker, json.loads(line))
        left_s = heard_at + _SILENCE_S - time.monotonic()
        if not select.select([0], [], [], max(0.0, left_s))[0]:
            _leave()
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            _leave()
        rest, heard_at = rest + chunk, time.monotonic()


def _do(worker: Worker, message: Mapping[str, Any]) -> None:
    match message["do"]:
        case str(what) if what == ALIVE:
            return
        case str(what) if what == SIGNAL and message["group"]:
            worker.signal_group(message["number"])
        case str(what) if what == SIGNAL:
            worker.signal_process(message["number"])
        case _:
            worker.send(message)


def _leave() -> None:
    """The supervisor is gone: nothing of the worker stays, nor do we."""
    sweep("", descendants=True)
    os._exit(_EXIT_LOST)
