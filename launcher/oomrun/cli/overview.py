"""Pictures of several runs, as lines of text for a terminal of a given size.

Covers: all runs at a glance, one run, one run's events, and the line of keys below
them. Does not cover: how one run looks (``frame.py``), when it is drawn.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from oomrun.cli.frame import STATE_STYLES, device_lines, frame
from oomrun.cli.glyphs import ASCII, Glyphs, sparkline
from oomrun.cli.watching import Watched
from oomrun.core import status, units, words

__all__ = ["VIEWS", "Shown", "picture"]

#: What can be seen: all runs, one of them, what happened to it. Its key, its name.
VIEWS = {"o": "overview", "r": "run", "e": "events"}
_STYLES = {**STATE_STYLES, "interrupted": "bold red"}


@dataclass(slots=True)
class Shown:
    """What a person has chosen to see: one of ``VIEWS``, and the run's number."""

    view: str = "overview"
    selected: int = 0

    def press(self, key: str, count: int) -> bool:
        """What a key does; False where it ends the whole.

        Args:
            key: a character, or up, down, enter, escape.
            count: how many runs there are.
        """
        if key in ("q", "Q"):
            return False
        if key in VIEWS:
            self.view = VIEWS[key]
        elif key == "enter":
            self.view = "run"
        elif key == "escape":
            self.view = "overview"
        elif key in ("down", "j", "\t", "n") and count:
            self.selected = (self.selected + 1) % count
        elif key in ("up", "k", "p") and count:
            self.selected = (self.selected - 1) % count
        return True


def picture(
    runs: Sequence[Watched], shown: Shown, *, width: int, height: int, now: float,
    glyphs: Glyphs,
) -> list[Text]:  # fmt: skip
    """The picture: at most ``height`` lines, none wider than ``width``."""
    room = max(1, height - 1)
    if not runs:
        lines = [Text("no runs yet; they appear here when they begin", "dim")]
    elif shown.view == "overview":
        lines = _overview(runs, shown.selected, width, room, now, glyphs)
    else:
        run = runs[min(shown.selected, len(runs) - 1)]
        lines = _one(run, shown.view, width, room, now, glyphs)
    lines = lines[:room]
    if height > 1:
        lines += [Text()] * (room - len(lines)) + [_keys(shown.view)]
    for line in lines:
        if glyphs is ASCII:
            line.plain = "".join(c if c.isascii() else "?" for c in line.plain)
        line.truncate(width, overflow="crop" if glyphs is ASCII else "ellipsis")
    return lines


def _keys(view: str) -> Text:
    parts = [("up down", "choose"), ("enter", "show"), *VIEWS.items(), ("q", "quit")]
    line = Text()
    for key, what in parts:
        line.append(f" {key} ", "reverse").append(
            f" {what}  ", "bold" if what == view else "dim"
        )
    return line


def _overview(
    runs: Sequence[Watched],
    selected: int,
    width: int,
    room: int,
    now: float,
    glyphs: Glyphs,
) -> list[Text]:
    """As many runs as there is room for, the selected one among them."""
    blocks = [
        _block(run, number == selected, width, now, glyphs)
        for number, run in enumerate(runs)
    ]
    first = 0
    while first < selected and sum(map(len, blocks[first : selected + 1])) > room:
        first += 1
    return [line for block in blocks[first:] for line in block]


def _block(
    run: Watched, selected: bool, width: int, now: float, glyphs: Glyphs
) -> list[Text]:
    state = run.state
    head = Text("> " if selected else "  ", "bold")
    head.append(words.one_line(run.name, 24), "bold reverse" if selected else "bold")
    head.append(f"  {run.standing}", _STYLES.get(run.standing, "bold"))
    if run.trouble:
        return [head, Text(f"  {words.one_line(run.trouble)}", "red")]
    for part in _parts(run, now):
        head.append(f" {glyphs.dot} {part}", "dim")
    lines = [head]
    if state.loss is not None:
        trend = sparkline(list(run.history.losses), 20, glyphs)
        line = Text(f"  loss {state.loss:.4g} ").append(trend, "cyan")
        if state.step_s:
            line.append(f"  {units.format_duration(state.step_s)}/step")
        lines.append(line)
    for device in status.devices(state):
        lines += [
            Text("  ").append_text(line)
            for line in device_lines(device, width - 2, glyphs)
        ]
    return lines


def _parts(run: Watched, now: float) -> list[str]:
    """Where the run is, how its batch is cut, what went wrong."""
    state, parts = run.state, []
    if state.epoch:
        of = f"/{state.epochs}" if state.epochs is not None else ""
        parts.append(f"epoch {state.epoch}{of}")
    if status.shows_steps(state) and state.step:
        parts.append(f"step {state.step}")
    device = next(iter(status.devices(state)), None)
    if device and device.share and device.micro_batch_size:
        parts.append(words.cut(device.share, device.micro_batch_size))
    if state.oom_events:
        parts.append(f"{state.oom_events} OOM{'s' if state.oom_events > 1 else ''}")
    if restarts := sum(state.restarts.values()):
        parts.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if state.terminal and state.ended_at is not None:
        ago = units.format_duration(max(0.0, float(round(now - state.ended_at))))
        parts.append(f"ended {ago} ago")
    return parts


def _one(
    run: Watched, view: str, width: int, room: int, now: float, glyphs: Glyphs
) -> list[Text]:
    lines = []
    if run.trouble:
        lines.append(Text(words.one_line(run.trouble), "red"))
    if run.standing == "interrupted":
        lines.append(Text(status.standing(run.state, supervisor_alive=False), "red"))
    if view == "run":
        height = room - len(lines)
        return lines + frame(
            run.state, run.history, width=width, height=height, now=now, glyphs=glyphs
        )
    lines.append(Text(f"{words.one_line(run.name, 40)}  {run.standing}", "bold"))
    said = list(run.history.said)[-max(0, room - len(lines)) :]
    for at, level, text in said:
        moment = f"{datetime.datetime.fromtimestamp(at):%H:%M:%S}"
        style = {"warning": "yellow", "error": "red"}.get(level, "")
        lines.append(Text.assemble((moment, "dim"), " ", (text, style)))
    return lines
