"""What a run shows while it runs: a live picture on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import scenarios
from oomrun.cli.frame import History, frame
from oomrun.cli.glyphs import ASCII, UNICODE, Glyphs
from oomrun.cli.view import make_observer
from oomrun.core.state import JobState
from terminals import Terminal

# Plays the scenario: waits for a line on stdin where it is told to.
PLAYER = """
import sys, time
import scenarios
from oomrun.cli.view import make_observer
pause_s, stop_at = float(sys.argv[1]), int(sys.argv[2])
with make_observer(sys.stdout, force=sys.argv[3]) as see:
    for number, (state, event) in enumerate(scenarios.states(scenarios.whole())):
        see(state, event)
        time.sleep(pause_s)
        if number == stop_at:
            sys.stdin.readline()
"""


@contextmanager
def terminal(
    columns: int, rows: int, *arguments: str, **env: str
) -> Iterator[Terminal]:
    found = Terminal(columns, rows, ["-c", PLAYER, *arguments], **env)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("columns", [80, 40])
def test_live_view_on_a_terminal(columns: int) -> None:
    with terminal(columns, 30, "0.02", "-1", "auto") as term:
        assert term.end() == 0
        text = "\n".join(term.lines())
    assert "digits  completed" in text
    assert "100%" in text
    assert "step 20/20" in text
    assert "global batch 256 = micro-batch 64 × 4" in text
    assert "peak 260MiB" in text
    assert "predicted 235MiB" in text
    assert "limit 600MiB" in text
    assert "2 OOMs · 1 recovered in process" in text
    assert "run digits completed" in text
    assert text.count("digits  completed") == 1  # one picture, not a trail of them
    (bar,) = [line for line in term.lines() if line.startswith("cpu:0 ")]
    assert "█" in bar
    assert "▓" in bar
    assert "┃" in bar


def test_live_view_in_the_middle_and_after_a_resize() -> None:
    middle = str(len(scenarios.opening()) + 10)
    with terminal(100, 30, "0", middle, "auto") as term:
        term.until("recovering")
        term.resize(50, 30)
        time.sleep(1.5)  # the view looks at the size once a second
        lines = term.until("recovering")
        assert max(map(len, lines)) <= 50
        assert "\n".join(lines).count("digits  recovering") == 1
        term.enter()
        assert term.end() == 0


def test_no_color() -> None:
    with terminal(80, 30, "0", "-1", "auto", NO_COLOR="1") as term:
        assert term.end() == 0
        assert "digits  completed" in "\n".join(term.lines())
    colours = {b"\x1b[3%dm" % number for number in range(1, 8)}
    assert not any(colour in term.received for colour in colours)


def test_a_dumb_terminal_gets_lines() -> None:
    with terminal(80, 50, "0", "-1", "auto", TERM="dumb") as term:
        assert term.end() == 0
    assert b"\x1b" not in term.received
    assert b"run digits completed" in term.received


def test_many_events_make_few_pictures() -> None:
    with terminal(80, 30, "0.002", "-1", "auto") as term:
        started = time.monotonic()
        assert term.end() == 0
        took_s = time.monotonic() - started
    pictures = term.received.count(b"global batch")
    assert 1 <= pictures <= 8 * max(1.0, took_s)


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    script = PLAYER + "\nsys.stderr.write('the run went on to its end')\n"
    # The read end is closed at once: every write fails from then on.
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for form in ("live", "plain", "json"):
        program = subprocess.run(
            [sys.executable, "-c", script, "0", "-1", form],
            stdout=write,
            stderr=subprocess.PIPE,
            env=env,
            check=False,
        )
        assert program.stderr.startswith(b"the run went on to its end"), form
    os.close(write)


def played(force: str) -> list[str]:
    """The lines of the scenario."""
    stream = io.StringIO()
    with make_observer(stream, force=force) as see:
        for state, event in scenarios.states(scenarios.whole()):
            see(state, event)
    return stream.getvalue().splitlines()


def test_what_is_no_terminal_gets_plain_lines() -> None:
    lines = played("auto")
    assert lines == played("plain")
    assert lines[-1].endswith("run digits completed: the script finished (exit code 0)")
    assert all(len(line.split(" ")[0]) == len("2026-01-01") for line in lines)
    warnings = [line for line in lines if " warning: " in line]
    assert len(warnings) == 3  # two OOMs and the decision to restart


def test_progress_is_said_every_ten_seconds_and_at_the_end_of_an_epoch() -> None:
    lines = [line for line in played("plain") if " epoch " in line and "loss" in line]
    assert [line.split("epoch ")[1].split(", loss")[0] for line in lines] == [
        "1/5, step 5/20",
        "1/5, step 20/20",
        "2/5, step 20/20",
        "3/5, step 5/20",
        "3/5, step 20/20",
        "4/5, step 20/20",
        "5/5, step 20/20",
    ]


def test_progress_goes_on_when_the_clock_is_set_back() -> None:
    stream = io.StringIO()
    see = make_observer(stream, force="plain")
    state = JobState()
    for at in (1000, 1001, 5):
        event = scenarios.progressed(at, 3)
        state = state.after(event)
        see(state, event)
    assert len(stream.getvalue().splitlines()) == 2


def test_json_lines_are_the_same_events() -> None:
    lines = [json.loads(line) for line in played("json")]
    assert len(lines) == len(played("plain"))
    assert set(lines[0]) == {
        "time", "level", "run", "attempt", "rank", "step", "text", "event",
    }  # fmt: skip
    oom = next(line for line in lines if line["event"]["type"] == "oom_occurred")
    assert (oom["level"], oom["run"], oom["attempt"], oom["rank"]) == (
        "warning", "digits", 1, 0,
    )  # fmt: skip
    assert oom["time"] == "2023-11-14T22:13:24.000+00:00"


def test_an_ascii_stream_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    see = make_observer(stream, force="plain")
    note = next(iter(scenarios.opening()))
    see(JobState(), type(note)(  # type: ignore[call-arg]
        at=1.0, run_id="r", name="ziffern-größe", version="0", seed=1, mathematics={},
    ))  # fmt: skip
    assert b"ziffern-gr??e" in raw.getvalue()


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="auto, live, plain, json"):
        make_observer(io.StringIO(), force="fancy")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("width", [20, 40, 63, 64, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 24])
def test_a_picture_always_fits(glyphs: Glyphs, width: int, height: int) -> None:
    history = History()
    for state, event in scenarios.states(scenarios.whole()):
        history.add(state, event)
        lines = frame(
            state, history, width=width, height=height, now=event.at, glyphs=glyphs
        )
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)
        if glyphs is ASCII:
            assert all(line.plain.isascii() for line in lines)


def test_the_time_left_comes_from_the_pace() -> None:
    history = History()
    state = JobState()
    for state, event in scenarios.states(scenarios.opening()):
        history.add(state, event)
    lines = frame(state, history, width=80, height=24, now=scenarios.START + 5)
    assert any("ETA 0:19" in line.plain for line in lines)  # 95 steps of 0.2 s
