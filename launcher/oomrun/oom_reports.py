"""Writes a report into the run's folder each time memory runs out.

Covers: when one is due, and writing it again when it is known what follows, also by a
supervisor that took the run over. Does not cover: what it says (``core.oom_report``).
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable
from pathlib import Path

from oomrun.core import events as ev
from oomrun.core import oom_report, status
from oomrun.core.errors import PlatformError
from oomrun.core.state import JobState
from oomrun.rundir import AttemptDir, RunDir, write_atomically

__all__ = ["OomReports"]

_log = logging.getLogger(__name__)

_MOST_KEPT = 400  # events of history


class OomReports:
    """An observer of the run (``recorder``). What it cannot write it only says.

    Args:
        run_dir: where the reports go.
        events: the run so far.
    """

    def __init__(self, run_dir: RunDir, events: Iterable[ev.Event]) -> None:
        self._run_dir = run_dir
        self._history: list[ev.Event] = []
        self._open: tuple[ev.OomOccurred, JobState, int] | None = None
        self._known = 0
        self._failed = False
        state = JobState()
        for event in events:
            state = state.after(event)
            self._learn(state, event, write=False)

    def __call__(self, state: JobState, event: ev.Event) -> None:
        self._learn(state, event, write=True)

    def _learn(self, state: JobState, event: ev.Event, *, write: bool) -> None:
        number = status.oom_number(state)
        oom = state.last_oom
        if number > self._known and oom is not None:
            self._open = (oom, state, len(self._history))
            if write:
                self._write(())
        elif self._open is not None and _follows(event):
            if write:
                self._write((event,))
            self._open = None
        self._known = number
        if oom_report.is_history(event):
            self._history.append(event)
            excess = len(self._history) - _MOST_KEPT
            if excess > 0 and self._open is None:
                del self._history[:excess]

    def _write(self, followed: tuple[ev.Event, ...]) -> None:
        if self._open is None:
            return
        oom, state, before = self._open
        attempt = self._run_dir.attempt(oom.attempt)
        moment = datetime.datetime.fromtimestamp(oom.at, tz=datetime.timezone.utc)
        text = oom_report.write(
            oom,
            state,
            self._history[:before],
            followed,
            when=f"{moment:%Y-%m-%d %H:%M:%S} UTC",
            log=str(_log_of(attempt, oom.rank)),
        )
        path = self._run_dir.oom_report(oom.attempt, status.oom_number(state))
        try:
            write_atomically(path, text.encode("utf-8", "replace"))
        except PlatformError as error:
            if not self._failed:
                _log.warning("the report of an exhaustion is missing: %s", error)
            self._failed = True


def _log_of(attempt: AttemptDir, rank: int) -> Path:
    """Of the worker that has the device: of the only one, where one has them all."""
    own = attempt.log(rank)
    return own if own.exists() else attempt.log()


def _follows(event: ev.Event) -> bool:
    return isinstance(event, ev.MicroBatchChanged | ev.DecisionMade | ev.RunEnded)
