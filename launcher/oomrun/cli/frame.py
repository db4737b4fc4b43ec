"""One picture of a running job, as lines of text for a terminal of a given size.

Covers: what the live view shows, as a function of the state, what was seen before, and
the size. Does not cover: when it is drawn (``live.py``).
"""

from __future__ import annotations

import datetime
import statistics
import textwrap
from collections import deque
from dataclasses import dataclass, field

from rich.text import Text

from oomrun.cli.glyphs import (
    ASCII,
    UNICODE,
    Glyphs,
    memory_bar,
    progress_bar,
    sparkline,
)
from oomrun.core import events as ev
from oomrun.core import status, units, words
from oomrun.core.state import JobState

__all__ = ["STATE_STYLES", "History", "device_lines", "frame", "headline"]

_NARROW = 64  # columns; below it, what is one line elsewhere takes two
_EVENTS_SHOWN = 6
_NUMBERS_WIDTH = 53  # of "in use 150MiB peak 260MiB predicted 235MiB limit 600MiB"


@dataclass(slots=True)
class History:
    """What a single state does not tell: how things went lately.

    Attributes:
        events: how many of the last ones are kept.
    """

    events: int = _EVENTS_SHOWN
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=240))
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    said: deque[tuple[float, str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.said = deque(maxlen=self.events)

    def add(self, state: JobState, event: ev.Event) -> None:
        """Takes ``event`` in; ``state`` is the one after it."""
        if isinstance(event, ev.Progressed):
            self.step_s.append(event.step_s)
            if event.loss is not None:
                self.losses.append(event.loss)
            return
        if isinstance(event, ev.AttemptStarted | ev.MicroBatchChanged):
            self.step_s.clear()  # the pace so far says nothing of the pace to come
        text = words.describe(event, state)
        if text is not None:
            self.said.append((event.at, words.level(event), text))


def frame(
    state: JobState, history: History, *, width: int, height: int, now: float,
    glyphs: Glyphs = UNICODE,
) -> list[Text]:  # fmt: skip
    """The picture: at most ``height`` lines, none wider than ``width``."""
    lines = [headline(state, now, glyphs)]
    if status.shows_steps(state):
        lines += _progress(state, history, width, glyphs)
        lines += _loss(state, history, width, glyphs)
    else:
        lines.append(Text("progress is in the program's own output", "dim"))
    lines.append(_batch(state, glyphs))
    for device in status.devices(state):
        lines.extend(device_lines(device, width, glyphs))
    lines.extend(_counters(state, now, width, glyphs))
    last = list(history.said)[-_EVENTS_SHOWN:]
    said = [line for item in last for line in _said(*item, width=width)]
    room = max(0, height - len(lines))
    lines.extend(said[-room:] if room else [])
    for line in lines:
        if glyphs is ASCII:
            line.plain = "".join(c if c.isascii() else "?" for c in line.plain)
        line.truncate(width, overflow="crop" if glyphs is ASCII else "ellipsis")
    return lines[:height]


STATE_STYLES = {
    "training": "bold green", "completed": "bold green", "evaluating": "bold cyan",
    "checkpointing": "bold cyan", "adapting": "bold yellow",
    "recovering": "bold yellow", "failed": "bold red", "preempted": "bold yellow",
}  # fmt: skip


def headline(state: JobState, now: float, glyphs: Glyphs) -> Text:
    """Name, state, attempt, and how long it has been going on."""
    line = Text(words.one_line(state.name, 40), style="bold")
    line.append(f"  {state.state}", style=STATE_STYLES.get(state.state, "bold"))
    if state.attempt > 1:
        line.append(f" {glyphs.dot} attempt {state.attempt}", style="yellow")
    if state.started_at is not None:
        end = state.ended_at if state.ended_at is not None else now
        line.append(
            f" {glyphs.dot} {_clock(end - state.started_at)}", style="dim not bold"
        )
    return line


def _clock(seconds: float) -> str:
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _progress(
    state: JobState, history: History, width: int, glyphs: Glyphs
) -> list[Text]:
    where = f"epoch {state.epoch}" if state.epoch else "no epochs"
    if state.epoch and state.epochs is not None:
        where += f"/{state.epochs}"
    step = f"step {state.step_in_epoch}"
    if state.steps_per_epoch is not None:
        step += f"/{state.steps_per_epoch}"
    done = _fraction_done(state)
    if done is None:
        return [Text(f"{where}  {step}")]
    tail = f" {done:4.0%}  {step}{_eta(state, history)}"
    if width < _NARROW:
        bar = progress_bar(done, width - len(where) - 6, glyphs)
        return [
            Text(f"{where} ").append_text(bar).append(f" {done:4.0%}"),
            Text(f"{step}{_eta(state, history)}"),
        ]
    bar = progress_bar(done, width - len(where) - len(tail) - 1, glyphs)
    return [Text(f"{where} ").append_text(bar).append(tail)]


def _fraction_done(state: JobState) -> float | None:
    if state.state == "completed":
        return 1.0
    if not state.epochs or not state.steps_per_epoch:
        return None
    done = max(0, state.epoch - 1) * state.steps_per_epoch + state.step_in_epoch
    return min(1.0, done / (state.epochs * state.steps_per_epoch))


def _eta(state: JobState, history: History) -> str:
    if state.terminal or not history.step_s:
        return ""
    if not state.epochs or not state.steps_per_epoch:
        return ""
    done = max(0, state.epoch - 1) * state.steps_per_epoch + state.step_in_epoch
    left = max(0, state.epochs * state.steps_per_epoch - done)
    # The median: one window that was traced or compiled would spoil a mean for long.
    return f"  ETA {_clock(left * statistics.median(history.step_s))}"


def _loss(state: JobState, history: History, width: int, glyphs: Glyphs) -> list[Text]:
    line = Text("loss ")
    line.append("-" if state.loss is None else f"{state.loss:.4g}", style="bold")
    pace = ""
    if state.step_s:
        pace = f"  {units.format_duration(state.step_s)}/step"
        if state.global_batch_size:
            pace += f"  {state.global_batch_size / state.step_s:.0f} samples/s"
    narrow = width < _NARROW
    room = width - len(line) - 1 - (0 if narrow else len(pace))
    if room > 0:
        line.append(
            " " + sparkline(list(history.losses), min(30, room), glyphs), "cyan"
        )
    if narrow:
        return [line, Text(pace.strip())]
    return [line.append(pace)]


def _batch(state: JobState, glyphs: Glyphs) -> Text:
    line = Text("global batch ")
    line.append(str(state.global_batch_size or "?"), style="bold")
    cuts = [d for d in status.devices(state) if d.micro_batch_size]
    if cuts:
        first = cuts[0]
        line.append(f" = micro-batch {first.micro_batch_size}")
        if first.accumulation_steps:
            line.append(f" {glyphs.times} {first.accumulation_steps}")
        if len(cuts) > 1:
            line.append(f" on each of {len(cuts)} devices")
    return line


def device_lines(device: status.DeviceStatus, width: int, glyphs: Glyphs) -> list[Text]:
    """A device's memory as a bar with numbers, on as many lines as they need."""
    name = words.one_line(device.id, 12)
    numbers = [
        Text.assemble((f"{label} ", "dim"), units.format_bytes(value))
        for label, value in (
            ("in use", device.in_use_bytes),
            ("peak", device.window_peak_bytes),
            ("predicted", device.predicted_peak_bytes),
            ("limit", device.limit_bytes),
        )
        if value is not None
    ]
    line = Text(f"{name} ")
    if not device.limit_bytes:
        return [line.append_text(Text(" ").join(numbers))]
    if width < _NARROW:
        bar = memory_bar(device, device.limit_bytes, width - len(name) - 1, glyphs)
        return [line.append_text(bar), *_flow(numbers, " ", width)]
    written = Text(" ").join(numbers)
    # The numbers come one by one; the bar should not jump with each.
    room = max(10, width - len(line) - 1 - max(len(written), _NUMBERS_WIDTH))
    bar = memory_bar(device, device.limit_bytes, room, glyphs)
    return [line.append_text(bar).append(" ").append_text(written)]


def _flow(parts: list[Text], separator: str, width: int) -> list[Text]:
    """The parts one after the other, on as many lines as they need."""
    lines: list[Text] = []
    for part in parts:
        if lines and len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1].append(separator).append_text(part)
        else:
            lines.append(part.copy())
    return lines


def _counters(state: JobState, now: float, width: int, glyphs: Glyphs) -> list[Text]:
    restarts = sum(state.restarts.values())
    parts = [
        _count(state.oom_events, "OOM"),
        f"{state.in_process_recoveries} recovered in process",
        _count(restarts, "restart"),
    ]
    if state.checkpoint is not None:
        age = _clock(now - state.checkpoint.at)
        parts.append(f"checkpoint {age} ago")
    style = "yellow" if state.oom_events or restarts else "dim"
    return _flow([Text(part, style) for part in parts], f" {glyphs.dot} ", width)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _said(at: float, level: str, text: str, *, width: int) -> list[Text]:
    """An event on one line, or on two where lines are short."""
    moment = f"{datetime.datetime.fromtimestamp(at):%H:%M:%S}"
    style = {"warning": "yellow", "error": "red"}.get(level, "")
    room = width - len(moment) - 1
    if width >= _NARROW or len(text) <= room or room < 10:
        return [Text.assemble((moment, "dim"), " ", (text, style))]
    first, *rest = textwrap.wrap(text, room)
    return [
        Text.assemble((moment, "dim"), " ", (first, style)),
        Text(" " * (len(moment) + 1) + " ".join(rest), style),
    ]
