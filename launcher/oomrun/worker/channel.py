"""The worker's end of the channel: events to the supervisor, requests from it.

One JSON object a line in both directions. The channel's closing means that the
supervisor is gone: the worker then ends at once (``lifeline.end_group``).
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from oomrun.core import event_json, launch
from oomrun.core import events as ev
from oomrun.worker import lifeline

__all__ = ["Channel", "OfOneDevice"]


# What is told of every device of a group; all else is the same for all of them, and is
# told of the first one. Another writes a checkpoint only where it ends the attempt.
_OF_EACH = (
    ev.WorkerReady, ev.OomOccurred, ev.LeakFound, ev.PeakRose, ev.SharePlanned,
    ev.ScriptEnded, ev.CheckpointSaved, ev.CheckpointFailed, ev.SizesWanted,
    ev.SizesTried,
)  # fmt: skip


class Channel:
    """Sends events (from any thread) and listens for the request to stop.

    Attributes:
        rank: of this worker.
        watcher: sees every event that is sent.
    """

    def __init__(self, descriptor: int) -> None:
        self.rank = 0
        self.watcher: Callable[[ev.Event], None] | None = None
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        # The script's own child processes must not keep the channel open.
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        self._closing = False
        self.stop_requested = threading.Event()
        self._remembered: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen(self) -> None:
        """Starts the thread that hears the supervisor, or its end."""
        threading.Thread(
            target=self._listen, name="oomrun-channel", daemon=True
        ).start()

    def send(self, event: ev.Event) -> None:
        """Sends one event. Does nothing once the channel is closed."""
        if self.rank and not isinstance(event, _OF_EACH):
            return
        if self.watcher is not None:
            self.watcher(event)
        line = json.dumps(event_json.to_json(event), allow_nan=False) + "\n"
        with self._lock:
            if self._closing:
                return
            try:
                self._socket.sendall(line.encode())
            except OSError:
                lifeline.end_group()

    def remembered(self, key: str, timeout_s: float) -> dict[str, Any]:
        """The supervisor's answer to a ``FitStarted``; empty where none comes in time.

        Args:
            key: its ``profile_key``.
            timeout_s: how long to wait; the answer comes at once if at all.
        """
        try:
            while True:
                answer = self._remembered.get(timeout=timeout_s)
                if answer.get("key") == key:
                    return answer
        except queue.Empty:
            return {}

    def close(self) -> None:
        """Ends the conversation from our side, in good order."""
        with self._lock:
            self._closing = True
            self._socket.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                read = self._socket.recv(65536)
            except OSError:
                read = b""
            if not read:
                if self._closing:
                    return
                lifeline.end_group()
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if message.get("do") == launch.STOP:
            self.stop_requested.set()
        elif message.get("do") == launch.REMEMBERED:
            self._remembered.put(message)


class OfOneDevice:
    """What is told of a further device of this process, as if it had its own worker.

    Args:
        channel: of the process.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, event: ev.Event) -> None:
        """Sends an event, unless the first device tells it for all."""
        if isinstance(event, _OF_EACH):
            self._channel.send(event)
