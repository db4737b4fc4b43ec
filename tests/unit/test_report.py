"""``oomrun report``: one page that needs nothing, and that nobody's words can break."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import scenarios
from history import watched_run
from oomrun.cli import report_command
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.journal import Journal
from oomrun.report import render
from oomrun.report.charts import thinned
from oomrun.report.story import tell
from oomrun.rundir import RunDir

HOSTILE = (
    "</title><script>alert(1)</script>",
    '"><img src=http://evil.example/x onerror=alert(1)>',
    "</style><link rel=stylesheet href=//evil.example>",
    "</pre></details><iframe src=javascript:alert(1)>",
    "]]>&lt;svg onload=alert(1)>\x00\x1b[31m\u202e\ud800",
)
KNOWN = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span",
    "b", "i", "figure", "figcaption", "svg", "rect", "path", "details", "summary",
    "pre", "table", "tr", "th", "td", "ul", "li", "a", "footer",
}  # fmt: skip


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag]
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(events: list[ev.Event]) -> str:
    return render(
        events, moment=lambda at: f"{at:.0f}", supervisor_alive=False, version="0"
    )


def with_words(value: Any, words: Iterator[str]) -> Any:
    """A JSON value with all of its texts replaced."""
    if isinstance(value, str):
        return next(words)
    if isinstance(value, list):
        return [with_words(item, words) for item in value]
    if isinstance(value, dict):
        return {key: with_words(item, words) for key, item in value.items()}
    return value


def hostile(events: list[ev.Event], seed: int) -> list[ev.Event]:
    """The same events, with somebody's worst words in every text."""
    rng = random.Random(seed)
    words = iter(lambda: rng.choice(HOSTILE), None)
    found = []
    for event in events:
        body = event_json.to_json(event)
        kept = {key: body[key] for key in ("v", "type", "at")}
        found.append(event_json.from_json({**with_words(body, words), **kept}))
    return found


@pytest.mark.parametrize("events", [scenarios.whole(), watched_run(end=1e9)])
def test_shows_what_the_run_did(events: list[ev.Event]) -> None:
    found = Page(page(events))
    text = " ".join(found.text)
    assert found.open == []
    assert found.tags <= KNOWN
    for wanted in ("limit", "predicted peak", "real peak", "samples a pass", "loss"):
        assert wanted in text
    ooms = [event for event in events if isinstance(event, ev.OomOccurred)]
    reports = [value for name, value in found.attributes if name == "id"]
    assert reports.count("events") == 1
    assert [name for name in reports if name.startswith("oom-")] == [
        f"oom-{number + 1}" for number in range(len(ooms))
    ]
    assert text.count("What you can do") == len(ooms)
    assert "completed, exit code 0: the script finished" in text


def test_asks_for_nothing_from_outside() -> None:
    text = page(watched_run(end=1e9))
    found = Page(text)
    links = {v for name, v in found.attributes if name in ("href", "src", "action")}
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("seed", range(5))
def test_hostile_words_stay_words(seed: int) -> None:
    events = hostile([*scenarios.whole(), *watched_run(end=1e9 + 100)], seed)
    text = page(events)
    text.encode("utf-8", "replace")
    found = Page(text)
    assert found.open == []
    assert found.tags <= KNOWN
    names = {name for name, _ in found.attributes}
    assert not [name for name in names if name.startswith("on") or name == "src"]
    assert {v for n, v in found.attributes if n == "style"} == set()
    assert all(v.startswith("#") for n, v in found.attributes if n == "href")
    assert "alert(1)" in "".join(found.text)


def test_any_beginning_of_a_run_can_be_shown() -> None:
    events = watched_run(end=1e9)
    for count in range(0, len(events), 7):
        assert Page(page(events[:count])).open == []


def test_odd_numbers_break_no_chart() -> None:
    odd = (float("inf"), float("nan"), -1e300, 1e300, None)
    events: list[ev.Event] = [*scenarios.opening()]
    events += [
        scenarios.progressed(10 - n, 6 + n, loss=loss, step_s=0.0)
        for n, loss in enumerate(odd)
    ]
    text = page(events)
    assert Page(text).open == []
    paths = re.findall(r' d="([^"]*)"', text)
    assert paths
    assert not [path for path in paths if re.search("nan|inf", path)]


def test_pauses_between_two_commands_are_left_out() -> None:
    events: list[ev.Event] = [*scenarios.opening()]
    resumed = ev.RunResumed(at=events[-1].at + 86_400, pid=1, reason="killed")
    later = scenarios.progressed(86_400 + 10, 6)
    found = tell([*events, resumed, later], str)
    assert found.end_s < 60
    assert found.paused_s == pytest.approx(86_400)
    assert "Pauses of 1d" in page([*events, resumed, later])


def test_a_clock_that_was_set_back_does_not_go_back() -> None:
    events = [scenarios.progressed(at, 1 + at) for at in (5, 9, 2, 3, 12)]
    found = tell([*scenarios.opening(), *events], str)
    times = [at for at, _ in found.micro_batch.points]
    assert times == sorted(times)
    assert found.end_s == pytest.approx(12)


def test_many_points_become_few_that_show_the_extremes() -> None:
    rng = random.Random(1)
    points = [(float(n), rng.random()) for n in range(50_000)]
    points[31_337] = (31_337.0, 99.0)
    points[40_000] = (40_000.0, -99.0)
    kept = thinned(points, 50_000.0)
    assert len(kept) < 1000
    assert (31_337.0, 99.0) in kept
    assert (40_000.0, -99.0) in kept
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)


def test_a_long_run_makes_a_page_of_bounded_size() -> None:
    events: list[ev.Event] = [*scenarios.opening()]
    for n in range(3000):
        events.append(scenarios.progressed(10 + n, 6 + n))
        events.append(
            ev.CheckpointSaved(
                at=scenarios.START + 10 + n, attempt=1, name=f"step-{n}", step=n,
                samples=n, epoch=1, size_bytes=1, duration_s=0.1, blocked_s=0.1,
                reason="schedule",
            )
        )  # fmt: skip
    assert len(page(events)) < 400_000


def call(*arguments: str) -> int:
    """Runs the command as the command line would."""
    parser = argparse.ArgumentParser()
    report_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *arguments])
    code: int = args.handler(args)
    return code


def recorded(folder: Path) -> RunDir:
    run_dir = RunDir(folder)
    run_dir.create()
    with Journal(run_dir.journal) as journal:
        for event in scenarios.whole():
            journal.append(event)
    return run_dir


def test_command_writes_into_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path / "run")
    assert call(str(run_dir.path)) == 0
    assert capsys.readouterr().out.strip() == str(run_dir.report)
    assert run_dir.report.read_text().startswith("<!doctype html>")


def test_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path / "run")
    target = tmp_path / "deep" / "page.html"
    assert call(str(run_dir.path), "-o", str(target)) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert not run_dir.report.exists()
    assert call(str(run_dir.path), "-o", "-") == 0
    assert capsys.readouterr().out == target.read_text()


def test_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(str(tmp_path)) == 2
    assert "holds no journal" in capsys.readouterr().err
    run_dir = recorded(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert call(str(run_dir.path), "-o", str(tmp_path / "file" / "x.html")) == 4
    assert "cannot be written" in capsys.readouterr().err
    lines = run_dir.journal.read_bytes().splitlines(keepends=True)
    lines[3] = json.dumps({"at": "soon"}).encode() + os.linesep.encode()
    run_dir.journal.write_bytes(b"".join(lines))
    assert call(str(run_dir.path)) == 4
    assert "oomrun:" in capsys.readouterr().err
