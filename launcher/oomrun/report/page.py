"""The report's page: what a run did, for a person with a browser and no network.

Covers: the sections and their words, everything from the journal escaped. Does not
cover: what happened (``story.py``), the charts (``charts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from oomrun.core import events as ev
from oomrun.core import status, units, words
from oomrun.report.charts import Band, Line, Mark, chart, strip
from oomrun.report.story import Attempt, Story, tell
from oomrun.report.style import CSS

__all__ = ["render"]

_MOST_ENTRIES = 400
_MOST_CHECKPOINTS = 40
_MOST_MARKS = 300
# Nothing is loaded from anywhere, and no script runs, whatever a job's name holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(
    events: Iterable[ev.Event],
    *,
    moment: Callable[[float], str],
    supervisor_alive: bool,
    version: str,
) -> str:
    """The page as a whole.

    Args:
        events: the run's journal.
        moment: a time, in seconds since the epoch, for a person.
        supervisor_alive: whether the run goes on at this moment.
        version: of oomrun.
    """
    story = tell(events, moment)
    title = _text(story.state.name or "a run")
    body = "".join(
        (
            *_head(story, moment, supervisor_alive),
            *_time_line(story),
            *_memory(story),
            *_training(story),
            *_events(story),
            *_checkpoints(story),
            *_exhaustions(story),
            *_notes(story),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title} – oomrun</title><style>{CSS}</style></head><body>{body}"
        f"<footer>Made by oomrun {_text(version)} from the run’s journal, "
        f"{story.events} events.</footer></body></html>\n"
    )


def _text(value: object) -> str:
    return escape(words.one_line(str(value)))


def _head(story: Story, moment: Callable[[float], str], alive: bool) -> Iterator[str]:
    state = story.state
    standing = status.standing(state, supervisor_alive=alive)
    began = f"Began {moment(story.first_at)}." if story.first_at is not None else ""
    yield f"<h1>{_text(state.name or 'a run')}</h1><p>{_text(standing)}</p>"
    yield f'<p class="dim">{_text(began)} {_text(_versions(story))}</p>'
    yield '<div class="tiles">'
    yield _tile("took", units.format_duration(story.end_s))
    if status.shows_steps(state):
        yield _tile("steps", f"{state.step}", f"{state.samples} samples")
        yield _tile("lost steps", f"{state.lost_steps}")
    if state.loss is not None:
        yield _tile("last loss", f"{state.loss:.4g}")
    yield _tile(
        "out of memory",
        "never" if not state.oom_events else f"{state.oom_events} ×",
        f"{state.in_process_recoveries} recovered in process",
    )
    yield _tile("attempts", f"{state.attempt}", _restarts(story))
    yield "</div>"


def _versions(story: Story) -> str:
    told = story.state.versions
    named = [("TensorFlow", told.get("tensorflow")), ("Keras", told.get("keras"))]
    return ", ".join(f"{name} {value}" for name, value in named if value)


def _restarts(story: Story) -> str:
    known = [f"{n} by {cause}" for cause, n in story.state.restarts.items() if n]
    return ", ".join(known) or "no restarts"


def _tile(label: str, value: str, more: str = "") -> str:
    small = f"<span>{_text(more)}</span>" if more else ""
    return (
        f'<div class="tile"><span>{_text(label)}</span><b>{_text(value)}</b>{small}'
        "</div>"
    )


def _time_line(story: Story) -> Iterator[str]:
    yield "<h2>Time line</h2>"
    yield strip("attempts", _attempt_bands(story), _marks(story), story.end_s)
    yield _axis(story)
    pauses = ""
    if story.paused_s >= 1:
        took = units.format_duration(story.paused_s)
        pauses = f" Pauses of {took}, in which no oomrun ran, are left out."
    yield (
        '<p class="dim">Attempts, one beside the other, and marks: memory ran out '
        "(red), another micro-batch (violet), a checkpoint (green)."
        f'{pauses} Everything that happened is <a href="#events">below</a>.</p>'
    )


def _events(story: Story) -> Iterator[str]:
    yield '<h2 id="events">What happened</h2>'
    left_out = len(story.entries) - _MOST_ENTRIES
    if left_out > 0:
        half = _MOST_ENTRIES // 2
        shown = [*story.entries[:half], *story.entries[-half:]]
        yield f'<p class="dim">{left_out} events in the middle are left out.</p>'
    else:
        shown = story.entries
    rows = []
    for entry in shown:
        text = _text(entry.text)
        if entry.number is not None:
            text += f' <a href="#oom-{entry.number}">report {entry.number}</a>'
        rows.append((entry.level, (_clock(entry.at_s), text)))
    yield _table(("time", "what happened"), rows)


def _attempt_bands(story: Story) -> list[Band]:
    return [
        Band(
            start_s=attempt.start_s,
            end_s=story.end_s if attempt.end_s is None else attempt.end_s,
            style=_STYLES.get(attempt.cause, "again"),
            title=_attempt(attempt),
        )
        for attempt in story.attempts
    ]


_STYLES = {"": "ran", "finished": "done", "device_oom": "failed", "host_oom": "failed"}


def _attempt(attempt: Attempt) -> str:
    ended = f": {attempt.summary or attempt.cause}" if attempt.cause else ""
    return words.one_line(f"attempt {attempt.number}{ended}")


_MARKED = {
    "oom_occurred": "red",
    "micro_batch_changed": "violet",
    "checkpoint_saved": "green",
    "checkpoint_failed": "red",
}


def _marks(story: Story, kinds: Iterable[str] = _MARKED) -> list[Mark]:
    chosen = set(kinds)
    marks = [
        Mark(at_s=entry.at_s, style=_MARKED[entry.kind], title=entry.text)
        for entry in story.entries
        if entry.kind in chosen
    ]
    # Red is drawn last, over what followed at once.
    marks = sorted(marks, key=lambda mark: mark.style == "red")
    return marks[:: 1 + len(marks) // _MOST_MARKS]


def _axis(story: Story) -> str:
    return f'<div class="axis"><span>0</span><span>{_clock(story.end_s)}</span></div>'


def _behind(story: Story) -> list[Band]:
    return [
        Band(
            start_s=attempt.start_s,
            end_s=story.end_s if attempt.end_s is None else attempt.end_s,
            style="even" if index % 2 else "odd",
            title=_attempt(attempt),
        )
        for index, attempt in enumerate(story.attempts)
    ]


def _memory(story: Story) -> Iterator[str]:
    figures = [
        chart(
            words.one_line(device),
            (
                Line(
                    name="limit",
                    style="red dashed",
                    points=curves.limit.points,
                    stepped=True,
                ),
                Line(
                    name="predicted peak",
                    style="amber",
                    points=curves.predicted.points,
                    stepped=True,
                ),
                Line(name="real peak", style="blue", points=curves.peak.points),
            ),
            story.end_s,
            words=lambda value: units.format_bytes(int(value)),
            marks=_marks(story, ("oom_occurred",)),
            bands=_behind(story),
        )
        for device, curves in story.memory.items()
    ]
    if any(figures):
        yield "<h2>Memory</h2>"
        yield from figures
        yield _axis(story)


def _training(story: Story) -> Iterator[str]:
    behind, ooms = _behind(story), _marks(story, ("oom_occurred",))
    losses, speeds = story.loss.points, story.speed.points
    figures = (
        chart(
            "loss",
            (Line(name="loss", style="blue", points=losses),),
            story.end_s,
            words=lambda value: f"{value:.4g}",
            marks=ooms,
            bands=behind,
            from_zero=False,
        ),
        chart(
            "throughput",
            (Line(name="samples a second", style="green", points=speeds),),
            story.end_s,
            words=lambda value: f"{value:.4g}/s",
            marks=ooms,
            bands=behind,
        ),
        chart(
            "micro-batch",
            (
                Line(
                    name="samples a pass",
                    style="violet",
                    points=story.micro_batch.points,
                    stepped=True,
                ),
            ),
            story.end_s,
            words=lambda value: f"{value:.4g}",
            marks=ooms,
            bands=behind,
        ),
    )
    if any(figures):
        yield "<h2>Training</h2>"
        yield from figures
        yield _axis(story)


def _checkpoints(story: Story) -> Iterator[str]:
    if not story.checkpoints:
        return
    yield "<h2>Checkpoints</h2>"
    left_out = len(story.checkpoints) - _MOST_CHECKPOINTS
    if left_out > 0:
        yield f'<p class="dim">The last {_MOST_CHECKPOINTS}; {left_out} before.</p>'
    rows = []
    for at_s, event in story.checkpoints[-_MOST_CHECKPOINTS:]:
        if isinstance(event, ev.CheckpointSaved):
            cells = (
                units.format_bytes(event.size_bytes),
                units.format_duration(event.duration_s),
                units.format_duration(event.blocked_s),
                _text(event.reason),
            )
            rows.append(("info", (_clock(at_s), str(event.step), *cells)))
        elif isinstance(event, ev.CheckpointFailed):
            cells = ("–", "–", "–", f"could not be written: {_text(event.reason)}")
            rows.append(("warning", (_clock(at_s), str(event.step), *cells)))
    head = ("time", "step", "size", "written in", "training waited", "why")
    yield _table(head, rows)


def _exhaustions(story: Story) -> Iterator[str]:
    if not story.exhaustions:
        return
    yield "<h2>Out of memory</h2>"
    for index, found in enumerate(story.exhaustions):
        opened = " open" if index == len(story.exhaustions) - 1 else ""
        yield (
            f'<details id="oom-{found.number}"{opened}><summary>{found.number}: '
            f"{_text(found.title)}, at {_clock(found.at_s)}</summary>"
            f"<pre>{escape(found.text)}</pre></details>"
        )


def _notes(story: Story) -> Iterator[str]:
    notes = status.status_json(story.state)["notes"]
    if notes:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{_text(note)}</li>" for note in notes)
        yield "</ul>"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}"


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table; the cells are HTML, the first ones short."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(
        f'<tr class="{level}">'
        + "".join(f'<td class="n">{cell}</td>' for cell in cells[:-1])
        + f"<td>{cells[-1]}</td></tr>"
        for level, cells in rows
    )
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'
