"""Copies finished checkpoints to a URL beside the training.

Covers: one thread that copies, what is left out where it is slower than checkpoints are
written, retention there, telling of it. A failure is told and never ends a training:
the next checkpoint, or the next process, tries again.
Does not cover: how a copy is made (``remote.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from oomrun import checkpoints
from oomrun.core import events as ev
from oomrun.core import remote as urls
from oomrun.core import retention
from oomrun.core.errors import CheckpointError
from oomrun.core.event import Event
from oomrun.core.launch import Launch
from oomrun.worker.remote import Remote, Unreachable

__all__ = ["Uploads"]


class Uploads:
    """The copies of one process.

    Args:
        launch: names the URL.
        send: takes events, from any thread.
    """

    def __init__(self, launch: Launch, send: Callable[[Event], None]) -> None:
        self._launch, self._send = launch, send
        self._folder = Path(launch.checkpoint_dir)
        self._remote: Remote | None = None
        self._waiting: list[str] = []
        self._changed = threading.Condition()
        self._busy = True
        self._claimed = False
        # A daemon: what hangs there must not keep a process that is done.
        self._thread = threading.Thread(
            target=self._work, name="oomrun-upload", daemon=True
        )
        self._thread.start()

    def put(self, name: str) -> None:
        """A checkpoint is complete on the local disk."""
        with self._changed:
            self._add(name)
            self._changed.notify_all()

    def _add(self, name: str) -> None:
        if name.startswith("step-"):
            # An older one that still waits is of no use any more.
            self._waiting = [n for n in self._waiting if not n.startswith("step-")]
        if name not in self._waiting:
            self._waiting.append(name)

    def wait(self, timeout_s: float) -> bool:
        """Whether all is there, in ``timeout_s`` at the latest."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._busy), timeout_s
            )

    def _work(self) -> None:
        try:
            self._left_over()
        except Exception as error:
            self._unforeseen("", error)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                name = self._waiting.pop(0)
                self._busy = True
            self._copy(name)

    def _left_over(self) -> None:
        """What a process before this one has not copied to its end."""
        local = [
            *checkpoints.names(self._folder, "fit"),
            *checkpoints.names(self._folder, "step")[:1],
        ]
        if not local:
            return
        try:
            there = [n for kind in ("fit", "step") for n in self._reach().names(kind)]
        except Unreachable as error:
            self._failed("", str(error))
            return
        with self._changed:
            for name in local:
                if name not in there:
                    self._add(name)

    def _reach(self) -> Remote:
        if self._remote is None:
            launch = self._launch
            remote = Remote(launch.checkpoint_url or "", launch.run_id)
            self._remote = remote
        return self._remote

    def _copy(self, name: str) -> None:
        began = time.monotonic()
        try:
            remote = self._reach()
            size = remote.upload(self._folder / name)
            self._claim(remote)
            self._tell(
                ev.CheckpointMirrored,
                name=name,
                size_bytes=size,
                duration_s=time.monotonic() - began,
            )
            for old in retention.superseded(remote.names("step"), self._launch.keep):
                remote.discard(old)
        except (Unreachable, CheckpointError) as error:
            if (self._folder / name).exists():  # else a newer one has come
                self._failed(name, str(error))
        except Exception as error:
            self._unforeseen(name, error)

    def _claim(self, remote: Remote) -> None:
        launch = self._launch
        if not self._claimed:
            remote.claim(
                {
                    "run": launch.run_id,
                    "seed": launch.seed,
                    "job": dict(launch.job),
                    "levers": list(launch.plan.levers),
                }
            )
            self._claimed = True

    def _failed(self, name: str, reason: str) -> None:
        self._tell(ev.MirrorFailed, name=name, reason=reason)

    def _unforeseen(self, name: str, error: Exception) -> None:
        """Whatever a file system's plugin raises: training goes on, and copies do."""
        text = urls.without_secrets(str(error))[:500]
        self._failed(name, f"{type(error).__name__}: {text}")

    def _tell(self, event: type[Event], **fields: object) -> None:
        self._send(
            event(at=time.time(), attempt=self._launch.attempt, **fields)  # type: ignore[call-arg]
        )
