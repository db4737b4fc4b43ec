"""Lines for a log: one for each thing worth knowing, progress now and then.

Covers: plain and JSON lines, and how often progress is said. Does not cover: the words.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from oomrun.core import event_json, words
from oomrun.core import events as ev
from oomrun.core.state import JobState
from oomrun.core.status import shows_steps

__all__ = ["LineWriter", "Selection", "json_line", "plain_line", "timestamp"]

_PROGRESS_EVERY_S = 10.0


class Selection:
    """Which events are worth a line: all with words, progress only now and then.

    It goes by the events' own times, so that a journal that is read later gives the
    same lines.
    """

    def __init__(self) -> None:
        self._last_at: float | None = None
        self._last_epoch = (0, 0)
        self._ended = True

    def takes(self, state: JobState, event: ev.Event) -> bool:
        """Whether ``event`` is worth a line."""
        if not isinstance(event, ev.Progressed):
            return words.describe(event, state) is not None
        epoch = (event.fit, event.epoch)
        last = self._last_at
        # Not `event.at - last`: a clock that is set back must not silence the log.
        due = last is None or not 0 <= event.at - last < _PROGRESS_EVERY_S
        ended = words.epoch_ended(event, state)
        # Where the end of an epoch went by unreported, the next one's start tells it.
        missed = epoch != self._last_epoch and not self._ended
        if not (due or ended or missed):
            return False
        self._last_at, self._last_epoch, self._ended = event.at, epoch, ended
        return True


class LineWriter:
    """Writes lines until nobody reads them any more; an observer (``view.py``)."""

    def __init__(
        self, stream: TextIO, form: Callable[[JobState, ev.Event], str]
    ) -> None:
        self._stream = stream
        self._form = form
        self._selection = Selection()
        self._gone = False

    def __call__(self, state: JobState, event: ev.Event) -> None:
        if self._gone or not self._selection.takes(state, event):
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = self._form(state, event).encode(encoding, "replace").decode(encoding)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # `oomrun job.yaml | head`: the run matters, its log does not.
            self._gone = True

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held back, so nothing is left to write."""


def plain_line(state: JobState, event: ev.Event) -> str:
    """``2026-02-01 12:00:00 attempt 1: single on cpu:0 …``."""
    mark = {"warning": "warning: ", "error": "error: "}.get(words.level(event), "")
    moment = datetime.datetime.fromtimestamp(event.at)
    return f"{moment:%Y-%m-%d %H:%M:%S} {mark}{words.describe(event, state)}"


def json_line(state: JobState, event: ev.Event) -> str:
    """One JSON object: time, level, run, attempt, rank, step, text, event."""
    body = {
        "time": timestamp(event.at),
        "level": words.level(event),
        "run": state.name,
        "attempt": state.attempt,
        "rank": getattr(event, "rank", None),
        "step": state.step if shows_steps(state) else None,
        "text": words.describe(event, state),
        "event": event_json.to_json(event),
    }
    return json.dumps(body)


def timestamp(at: float) -> str:
    """The moment as ISO 8601 in UTC, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds")
