"""The run's memory while it runs: journal first, then state, then observers.

Covers: the order of these three, and progress, of which there is too much to write
every bit to disk. Does not cover: where events come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from oomrun.core import events as ev
from oomrun.core.state import JobState, replay
from oomrun.journal import Journal

__all__ = ["Observer", "Recorder", "joined"]

_log = logging.getLogger(__name__)

#: Called with the state after an event, and the event. Must not block.
Observer = Callable[[JobState, ev.Event], None]


class Recorder:
    """Takes every event of the run.

    Attributes:
        state: the run so far.
        journaled: the run as its journal has it: what a supervisor that is started
            again will know. Counters that others keep must be read from this one, or
            they could fall.
    """

    def __init__(
        self,
        journal: Journal,
        observers: Sequence[Observer] = (),
        *,
        on_journaled: Callable[[JobState], None] | None = None,
        progress_every_s: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state: JobState = replay(journal.events)
        self.journaled: JobState = self.state
        self._on_journaled = on_journaled
        self._journal = journal
        self._observers = tuple(observers)
        self._every_s = progress_every_s
        self._monotonic = monotonic
        self._pending: ev.Progressed | None = None
        self._due = float("-inf")
        self._broken: set[Observer] = set()

    def record(self, event: ev.Event) -> JobState:
        """Adds an event; returns the state after it.

        Progress is journaled at most every few seconds, joined so that nothing is lost
        but the moments in between, and always before any other event.

        Raises:
            JournalError: it could not be journaled; the state is then without it.
        """
        if isinstance(event, ev.Progressed):
            self._progress(event)
        else:
            self.flush()
            self._append(event)
        self.state = self.state.after(event)
        self._observe(event)
        return self.state

    def flush(self) -> None:
        """Journals progress that waits for its time."""
        if self._pending is not None:
            self._append(self._pending)
            self._pending = None
            self._due = self._monotonic() + self._every_s

    def _append(self, event: ev.Event) -> None:
        self._journal.append(event)
        self.journaled = self.journaled.after(event)
        if self._on_journaled is not None:
            self._on_journaled(self.journaled)

    def due_at(self) -> float | None:
        """The monotonic time at which progress wants to be journaled, if any waits."""
        return self._due if self._pending is not None else None

    def flush_if_due(self) -> None:
        """Journals progress that has waited long enough."""
        if self._pending is not None and self._monotonic() >= self._due:
            self.flush()

    def _progress(self, event: ev.Progressed) -> None:
        waiting = self._pending
        both = None if waiting is None else joined(waiting, event)
        if both is None:
            self.flush()
        self._pending = both or event
        self.flush_if_due()

    def _observe(self, event: ev.Event) -> None:
        for observer in self._observers:
            try:
                observer(self.state, event)
            except Exception:  # a view that fails must not end a training
                if observer not in self._broken:
                    self._broken.add(observer)
                    _log.warning("an observer failed", exc_info=True)


def joined(first: ev.Progressed, then: ev.Progressed) -> ev.Progressed | None:
    """One event that says what two in a row do, or None where one cannot.

    The steps of both windows and the peaks of both are in it, so that the state after
    it is the state after both.
    """
    same = ("attempt", "fit", "micro_batch_size", "global_batch_size")
    if any(getattr(first, name) != getattr(then, name) for name in same):
        return None
    steps = first.window_steps + then.window_steps
    total_s = first.step_s * first.window_steps + then.step_s * then.window_steps
    return replace(
        then,
        window_steps=steps,
        step_s=total_s / steps if steps > 0 else then.step_s,
        memory=_joined_memory(first.memory, then.memory),
    )


def _joined_memory(
    first: Iterable[ev.DeviceMemory], then: Iterable[ev.DeviceMemory]
) -> tuple[ev.DeviceMemory, ...]:
    devices: dict[str, ev.DeviceMemory] = {}
    for device in (*first, *then):
        before = devices.get(device.device, device)
        peaks = (before.peak_bytes, device.peak_bytes)
        highest = max((peak for peak in peaks if peak is not None), default=None)
        devices[device.device] = replace(device, peak_bytes=highest)
    return tuple(devices.values())
