"""A run's events as what a report shows: attempts, curves, exhaustions, checkpoints.

Covers: one pass over the events, on a time axis without the pauses in which no oomrun
ran. Does not cover: drawing (``charts.py``) and words around it (``page.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from oomrun.core import events as ev
from oomrun.core import oom_report, status, words
from oomrun.core.state import JobState

__all__ = ["Attempt", "Curve", "Entry", "Exhaustion", "Story", "tell"]

_MOST_HISTORY = 400  # events that a report of an exhaustion may look back on


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of all workers; ``cause`` is empty while it lasts."""

    number: int
    start_s: float
    end_s: float | None = None
    cause: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the time line; ``kind`` is the event's type, ``number`` its OOM's."""

    at_s: float
    level: str
    kind: str
    text: str
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustion:
    """One time that memory ran out, with its report."""

    number: int
    at_s: float
    title: str
    text: str


@dataclass(slots=True)
class Curve:
    """Values over time. A None ends a piece of the line."""

    points: list[tuple[float, float | None]] = field(default_factory=list)

    def add(self, at_s: float, value: float | None) -> None:
        """One more point; a second gap in a row is none."""
        if value is not None or (self.points and self.points[-1][1] is not None):
            self.points.append((at_s, value))


@dataclass(slots=True)
class DeviceCurves:
    """Memory of one device, in bytes."""

    limit: Curve = field(default_factory=Curve)
    predicted: Curve = field(default_factory=Curve)
    peak: Curve = field(default_factory=Curve)


@dataclass(slots=True)
class Story:
    """All that a report shows."""

    state: JobState = field(default_factory=JobState)
    events: int = 0
    first_at: float | None = None
    end_s: float = 0.0
    paused_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    exhaustions: list[Exhaustion] = field(default_factory=list)
    checkpoints: list[tuple[float, ev.Event]] = field(default_factory=list)
    memory: dict[str, DeviceCurves] = field(default_factory=dict)
    loss: Curve = field(default_factory=Curve)
    speed: Curve = field(default_factory=Curve)
    micro_batch: Curve = field(default_factory=Curve)


def tell(events: Iterable[ev.Event], moment: Callable[[float], str]) -> Story:
    """The story of a run.

    Args:
        events: its journal.
        moment: a time, in seconds since the epoch, for a person.
    """
    teller = _Teller(moment)
    for event in events:
        teller.take(event)
    return teller.finish()


class _Teller:
    def __init__(self, moment: Callable[[float], str]) -> None:
        self._story, self._moment = Story(), moment
        self._last_at: float | None = None
        self._history: list[ev.Event] = []
        self._open: tuple[ev.OomOccurred, JobState, tuple[ev.Event, ...]] | None = None

    def take(self, event: ev.Event) -> None:
        story = self._story
        before = status.oom_number(story.state)
        story.state = story.state.after(event)
        story.events += 1
        at_s = story.end_s = self._time(event)
        self._attempts(event, at_s)
        self._curves(event, at_s)
        if isinstance(event, ev.CheckpointSaved | ev.CheckpointFailed):
            story.checkpoints.append((at_s, event))
        number = status.oom_number(story.state)
        ran_out = number > before
        self._entry(event, at_s, number if ran_out else None)
        self._exhaustion(event, at_s, ran_out)
        if oom_report.is_history(event):
            self._history = [*self._history[1 - _MOST_HISTORY :], event]

    def finish(self) -> Story:
        if self._open is not None:
            self._close(())
        return self._story

    def _time(self, event: ev.Event) -> float:
        """Seconds of the run; a clock that was set back does not go back here."""
        story = self._story
        if self._last_at is None:
            self._last_at = story.first_at = event.at
        passed = max(0.0, event.at - self._last_at)
        self._last_at = max(event.at, self._last_at)
        if isinstance(event, ev.RunResumed | ev.RunStarted):
            story.paused_s += passed
            return story.end_s
        return story.end_s + passed

    def _attempts(self, event: ev.Event, at_s: float) -> None:
        attempts = self._story.attempts
        open_ = bool(attempts) and attempts[-1].end_s is None
        if open_ and isinstance(event, ev.AttemptStarted | ev.RunResumed):
            # Its supervisor died before it could tell.
            attempts[-1] = replace(attempts[-1], end_s=at_s, cause="unknown")
        if isinstance(event, ev.AttemptStarted):
            attempts.append(Attempt(number=event.attempt, start_s=at_s))
        elif isinstance(event, ev.AttemptEnded) and open_:
            attempts[-1] = replace(
                attempts[-1], end_s=at_s, cause=event.cause, summary=event.summary
            )

    def _curves(self, event: ev.Event, at_s: float) -> None:
        story = self._story
        if isinstance(event, ev.AttemptStarted | ev.Restored):
            for curve in (story.loss, story.speed):
                curve.add(at_s, None)
        elif isinstance(event, ev.Progressed):
            story.loss.add(at_s, event.loss)
            fast = event.global_batch_size / event.step_s if event.step_s else None
            story.speed.add(at_s, fast)
            story.micro_batch.add(at_s, event.micro_batch_size)
        else:
            return
        told = {item.device: item for item in getattr(event, "memory", ())}
        for device in status.devices(story.state):
            curves = story.memory.setdefault(device.id, DeviceCurves())
            curves.limit.add(at_s, device.limit_bytes)
            curves.predicted.add(at_s, device.predicted_peak_bytes)
            seen = told.get(device.id)
            curves.peak.add(at_s, seen.peak_bytes if seen else None)

    def _entry(self, event: ev.Event, at_s: float, number: int | None) -> None:
        if isinstance(event, ev.Progressed):
            return
        text = words.describe(event, self._story.state)
        if text is not None:
            self._story.entries.append(
                Entry(
                    at_s=at_s,
                    level=words.level(event),
                    kind=event.type,
                    text=text,
                    number=number,
                )
            )

    def _exhaustion(self, event: ev.Event, at_s: float, ran_out: bool) -> None:
        oom = self._story.state.last_oom
        if ran_out and oom is not None:
            if self._open is not None:
                self._close(())
            self._open = (oom, self._story.state, tuple(self._history))
            self._at_s = at_s
        elif self._open is not None and isinstance(
            event, ev.MicroBatchChanged | ev.DecisionMade | ev.RunEnded
        ):
            self._close((event,))

    def _close(self, followed: tuple[ev.Event, ...]) -> None:
        if self._open is None:
            return
        oom, state, history = self._open
        text = oom_report.write(
            oom,
            state,
            history,
            followed,
            when=self._moment(oom.at),
            log=f"attempts/{oom.attempt:04d}/rank-{oom.rank}.log",
        )
        where = "host memory" if oom.kind == "host" else oom.device or "a device"
        self._story.exhaustions.append(
            Exhaustion(
                number=status.oom_number(state),
                at_s=self._at_s,
                title=f"{where}, {oom.phase}, step {oom.step}",
                text=text,
            )
        )
        self._open = None
