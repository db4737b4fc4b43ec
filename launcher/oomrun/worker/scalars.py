"""What oomrun does, beside the script's own curves in TensorBoard.

Covers: where a script's ``fit`` has a TensorBoard callback, a run ``oomrun`` in its
folder, with memory, micro-batch and events by step. Does not cover: the script's own
curves, and loops without callbacks.

TensorBoard's writer is used as it is, not ``tf.summary``: its lines need no operations,
which would be one more thing to run where memory has just run out.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from oomrun.core import events as ev

if TYPE_CHECKING:
    from oomrun.worker.session import Session

__all__ = ["FOLDER", "follow"]

#: The run's name in TensorBoard, beside Keras's ``train`` and ``validation``.
FOLDER = "oomrun"
_FLUSH_EVERY_S = 5.0


def follow(session: Session, callbacks: Sequence[Any]) -> None:
    """Has the coming fit's events written where its TensorBoard callback writes.

    Args:
        session: the training; only the first worker of a group writes.
        callbacks: the script's own.
    """
    folder = _folder(callbacks) if session.launch.rank == 0 else None
    seen = session.channel.watcher
    if isinstance(seen, _Scalars):
        if seen.folder == folder:
            return
        seen.close()
    session.channel.watcher = None
    if folder is None:
        return
    try:
        session.channel.watcher = _Scalars(folder, session)
    except Exception as error:  # no tensorboard, or no such place: the script's affair
        session.note(
            "no-scalars", f"nothing is written to {folder} for TensorBoard: {error}"
        )


def _folder(callbacks: Sequence[Any]) -> str | None:
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):
            return os.path.join(str(callback.log_dir), FOLDER)
    return None


class _Scalars:
    """Writes events as they are sent; falls silent where that fails."""

    def __init__(self, folder: str, session: Session) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text import summary_v2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        self._session, self._attempt = session, session.launch.attempt
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._text = summary_v2.text_pb
        self._writer: Any = EventFileWriter(folder, max_queue_size=1000)
        self._counts: Counter[str] = Counter()
        self._flushed_at = time.monotonic()
        self._begun = False

    def __call__(self, event: ev.Event) -> None:
        if self._writer is None:
            return
        try:
            if isinstance(event, ev.Restored) or not self._begun:
                self._begin(getattr(event, "step", self._session.step))
            self._write(event)
        except Exception as error:  # the disk is full: the training goes on
            self._writer = None
            self._session.note(
                "no-scalars", f"{self.folder} cannot be written any more: {error}"
            )

    def close(self) -> None:
        """Writes what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _begin(self, step: int) -> None:
        """What an earlier attempt wrote of steps from here on was lost: it goes."""
        self._begun = True
        self._add(step + 1, session_log={"status": "START"})
        self._add(step, summary=self._scalars([("events/attempt", self._attempt)]))

    def _write(self, event: ev.Event) -> None:
        step = self._session.step
        if isinstance(event, ev.Progressed):
            self._add(event.step, summary=self._scalars(_progress(event)))
            if time.monotonic() - self._flushed_at < _FLUSH_EVERY_S:
                return
        elif told := _told(event):
            name, text = told
            self._counts[name] += 1
            scalar = (f"events/{name}", float(self._counts[name]))
            self._add(step, summary=self._scalars([scalar]))
            self._add(step, summary=self._text(f"events/{name}/text", text))
        else:
            return
        # The process may leave at once after some of these.
        self._writer.flush()
        self._flushed_at = time.monotonic()

    def _scalars(self, values: Any) -> Any:
        items = [self._summary.Value(tag=t, simple_value=float(v)) for t, v in values]
        return self._summary(value=items)

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **what))


def _progress(event: ev.Progressed) -> Iterator[tuple[str, float]]:
    yield "batch/micro_batch_size", event.micro_batch_size
    yield "batch/global_batch_size", event.global_batch_size
    yield "step/seconds", event.step_s
    alone = len(event.memory) == 1
    for device in event.memory:
        end = "" if alone else f"/{device.device}"
        for name in ("in_use_bytes", "peak_bytes", "limit_bytes"):
            value = getattr(device, name)
            if value is not None:
                yield f"memory/{name}{end}", value


def _told(event: ev.Event) -> tuple[str, str] | None:
    """What an event is counted as, and its words."""
    match event:
        case ev.OomOccurred():
            where = f"{event.kind} memory ran out in {event.phase} on {event.device}"
            return "out_of_memory", f"{where}: {event.message}"
        case ev.MicroBatchChanged():
            changed = f"micro-batch {event.old} to {event.new} in {event.phase}"
            return "micro_batch_changed", f"{changed}: {event.reason}"
        case ev.MicroBatchPlanned():
            text = f"micro-batch {event.micro_batch_size}: {event.reason}"
            return "micro_batch_planned", text
        case ev.LeakFound():
            text = f"memory leaks {event.bytes_per_step:.0f} bytes a step"
            return "leak", f"{text} on {event.device}"
        case ev.CheckpointSaved():
            return "checkpoint", event.name
        case ev.Restored():
            place = event.name or "the beginning"
            return "restored", f"{place}: {event.lost_steps} steps lost"
        case _:
            return None
