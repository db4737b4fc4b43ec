"""The run's checkpoints, as the worker uses them: the one to go on from, and new ones.

Covers: finding what belongs to a call of ``fit`` and is whole, refusing what belongs to
another run or another script, reporting what was written. Does not cover: what is in
them (``checkpointing.py``) and when one is due (``session.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomrun import checkpoints, host
from oomrun.core import events as ev
from oomrun.core.errors import CheckpointError, UnreadableError
from oomrun.core.launch import Launch
from oomrun.worker import checkpointing, optimizers, pool
from oomrun.worker.channel import Channel
from oomrun.worker.encoding import Arrays
from oomrun.worker.uploading import Uploads

__all__ = ["ScriptChangedError", "Store"]


# Between two looks, where nothing else is left to go on from.
_PAUSES_S = (1.0, 2.0)


class ScriptChangedError(RuntimeError):
    """The script does not do what it did when the checkpoint was written."""


@dataclass(frozen=True)
class _Saved:
    """What is told of a checkpoint once it is on disk."""

    step: int
    samples: int
    epoch: int
    reason: str


class Store:
    """The checkpoint folder of one run."""

    def __init__(self, launch: Launch, channel: Channel) -> None:
        self._launch, self._channel = launch, channel
        self._folder = Path(launch.checkpoint_dir)
        self._writer = checkpointing.Writer(
            self._folder,
            launch.keep,
            self._written,
            self._failed,
            timeout_s=launch.checkpoint_timeout_s,
            behind=self._room_behind,
        )
        # The workers of a group read all that one of them has written.
        self._writes = launch.rank == 0
        if self._writes:
            checkpoints.remove_unfinished(self._folder)
        self._uploads: Uploads | None = None
        if self._writes and launch.checkpoint_url and not launch.measure:
            self._uploads = Uploads(launch, channel.send)

    def find(
        self, fit: int, fingerprint: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Arrays] | None:
        """State and arrays to go on from in the ``fit``-th call of ``fit``, if any.

        The record of its completion comes before all others; else it is the newest
        checkpoint that is whole. One that is not is deleted, and never silently. One
        that cannot be read now is kept: it may be whole.

        Raises:
            ScriptChangedError: it is of another run, or of another call of ``fit``.
            UnreadableError: there are some, and none can be read. To begin anew would
                leave behind what was trained.
        """
        told: set[str] = set()
        for pause_s in (*_PAUSES_S, None):
            found, unread = self._look(fit, fingerprint, told)
            if found is not None or unread is None:
                break
            if pause_s is None:
                raise UnreadableError(
                    f"no checkpoint can be read, and training does not begin anew: "
                    f"{unread}",
                    where=str(self._folder),
                    hint="the same command goes on once it can, --fresh starts over",
                )
            time.sleep(pause_s)
        return found

    def _look(
        self, fit: int, fingerprint: Mapping[str, Any], told: set[str]
    ) -> tuple[tuple[dict[str, Any], Arrays] | None, UnreadableError | None]:
        """What ``find`` finds, and the last checkpoint that could not be read now.

        That one is told of once, and then among ``told``.
        """
        unread: UnreadableError | None = None
        done = [n for n in checkpoints.names(self._folder, "fit") if _number(n) == fit]
        for name in [*done, *checkpoints.names(self._folder, "step")]:
            # Another fit's may be large, and reading all of it slow.
            if checkpointing.claimed_fit(self._folder / name) not in (fit, None):
                continue
            try:
                state, arrays = checkpointing.load(self._folder / name)
            except UnreadableError as error:
                if name not in told:
                    self._send(ev.CheckpointRejected, name=name, reason=str(error))
                told.add(name)
                unread = error
                continue
            except CheckpointError as error:
                self._send(ev.CheckpointRejected, name=name, reason=str(error))
                if self._writes:
                    # A folder that is read-only: it is rejected each time.
                    with contextlib.suppress(OSError):
                        checkpoints.discard(self._folder / name)
                continue
            if state["fit"] == fit:
                state["name"] = name
                self._check(state, fingerprint)
                return (state, arrays), unread
        return None, unread

    def _check(self, state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
        if state["run"] != self._launch.run_id:
            raise ScriptChangedError(
                f"{self._folder} holds checkpoints of another run: give this job a "
                "checkpoint.dir of its own, or call oomrun with --fresh"
            )
        for key, value in fingerprint.items():
            before = state["fingerprint"].get(key)
            if before != value:
                raise ScriptChangedError(
                    f"fit number {state['fit']}: {key} is {value!r}, but was "
                    f"{before!r} when {state['name']} was written. Call oomrun with "
                    "--fresh to train from the start"
                )

    def save(
        self,
        name: str,
        model: Any,
        state: Mapping[str, Any],
        reason: str,
        *,
        last: bool = False,
    ) -> None:
        """Writes everything as it is now, in the background.

        Args:
            name: of the checkpoint.
            model: has the variables.
            state: all else.
            reason: why, for people.
            last: the attempt ends with this worker, which may be another than the one
                that else writes.
        """
        # The first worker, which waits for this one, may have saved the step already.
        if self._writes or (last and not (self._folder / name).exists()):
            self._writer.save(name, model, *self._with_told(model, state, reason))

    def copy(
        self, name: str, model: Any, state: Mapping[str, Any], reason: str
    ) -> Callable[[], None]:
        """Copies everything now; the function returned writes it in the background."""
        if not self._writes:
            return _nothing
        return self._writer.copy(name, model, *self._with_told(model, state, reason))

    def _with_told(
        self, model: Any, state: Mapping[str, Any], reason: str
    ) -> tuple[dict[str, Any], _Saved]:
        told = _Saved(
            step=state["step"],
            samples=state["samples"],
            epoch=state["epoch"] + 1,
            reason=reason,
        )
        whole = {
            **state,
            "run": self._launch.run_id,
            "optimizer": optimizers.in_use(model),
        }
        return whole, told

    def _room_behind(self, size: int) -> bool:
        """Whether variables may be copied while training goes on.

        It takes ``size`` bytes at most: of the host, where no device has memory of its
        own. On one that has, the copies that TensorFlow makes meanwhile would be taken
        for what a step needs, and may not fit.
        """
        if any(device.kind != "cpu" for device in self._launch.plan.devices):
            return False
        return pool.limit_bytes() is None and host.room_bytes() >= size

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        self._writer.wait()

    def finish(self) -> None:
        """As ``wait``, and until copies are where they are to be."""
        self.wait()
        if self._uploads is not None:
            self._uploads.wait(self._launch.checkpoint_timeout_s)

    def _written(
        self, name: str, size: int, seconds: float, blocked_s: float, told: _Saved
    ) -> None:
        self._send(
            ev.CheckpointSaved,
            name=name,
            step=told.step,
            samples=told.samples,
            epoch=told.epoch,
            size_bytes=size,
            duration_s=seconds,
            blocked_s=blocked_s,
            reason=told.reason,
        )
        if self._uploads is not None:
            self._uploads.put(name)

    def _failed(self, reason: str, told: _Saved) -> None:
        self._send(ev.CheckpointFailed, step=told.step, reason=reason)

    def _send(self, event: Any, **fields: Any) -> None:
        self._channel.send(
            event(at=time.time(), attempt=self._launch.attempt, **fields)
        )


def _nothing() -> None:
    """Another worker writes."""


def _number(name: str) -> int:
    return int(name.split("-")[1])
