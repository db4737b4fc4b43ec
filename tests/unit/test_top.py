"""``oomrun top``: several runs on a terminal, with keys; plain text in a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import scenarios
from oomrun.cli import main
from oomrun.cli.glyphs import ASCII, UNICODE, Glyphs
from oomrun.cli.overview import VIEWS, Shown, picture
from oomrun.cli.watching import Watching
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.errors import JournalError
from oomrun.journal import Follower
from terminals import Terminal


def write(journal: Path, events: Sequence[ev.Event]) -> None:
    """Appends the events, as a supervisor does."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a") as file:
        for event in events:
            file.write(json.dumps(event_json.to_json(event)) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that is over and one that was interrupted."""
    write(tmp_path / "runs" / "done" / "journal.jsonl", scenarios.whole())
    write(tmp_path / "runs" / "going" / "journal.jsonl", scenarios.opening())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def top(folder: Path) -> Iterator[Terminal]:
    """``oomrun top`` in that folder."""
    found = Terminal(100, 30, ["-m", "oomrun", "top"], folder)
    yield found
    found.close()


def test_all_runs_at_a_glance(top: Terminal) -> None:
    text = "\n".join(top.until("going"))
    assert "> done  completed" in text
    assert "going  interrupted" in text
    assert "epoch 5/5" in text
    assert "micro-batch 64 x 4 (global 256)" in text
    assert "2 OOMs · 1 restart" in text
    (done, going) = [line for line in text.splitlines() if "cpu:0" in line]
    for sign in "█▓░":
        assert sign in done
    assert "┃" in done  # what was predicted
    assert "peak 260MiB predicted 235MiB limit 600MiB" in done
    assert "peak 410MiB" in going
    losses = [line for line in text.splitlines() if line.startswith("  loss ")]
    assert len(losses) == 2
    assert set(losses[0]) & set(UNICODE.spark)
    assert "200ms/step" in losses[0]


def test_keys_lead_from_one_view_to_another(top: Terminal) -> None:
    top.until("> done")
    top.type(b"\x1b[B")
    top.until("> going")
    top.enter()
    text = "\n".join(top.until("global batch 256 = micro-batch 128"))
    assert "interrupted while training" in text
    assert "done" not in text
    top.type(b"e")
    text = "\n".join(top.until("going  interrupted"))
    assert "run digits started" in text
    assert "256 -> 128 x 2" in text
    top.type(b"o")
    top.until("> going")
    top.type(b"kq")
    assert top.end() == 0
    assert top.edits_lines()


def test_what_happens_is_seen_and_a_new_run_too(top: Terminal, folder: Path) -> None:
    top.until("epoch 1/5")
    write(folder / "runs" / "going" / "journal.jsonl", scenarios.middle())
    top.until("epoch 3/5")
    write(folder / "runs" / "new" / "journal.jsonl", scenarios.opening()[:2])
    top.until("new  interrupted")


def test_a_shell_that_changes_the_terminal_does_not_take_the_keys(
    top: Terminal,
) -> None:
    top.until("> done")
    top.edit_lines()  # as a shell does between ctrl-Z and `fg`
    top.until_keys()
    top.type(b"j")
    top.until("> going")


def test_another_size(top: Terminal) -> None:
    top.until("> done")
    top.resize(50, 12)
    top.type(b"jk")
    lines = top.until("> done")
    assert max(map(len, lines)) <= 50


def test_ctrl_c_leaves_the_terminal_as_it_was(top: Terminal) -> None:
    top.until("> done")
    assert not top.edits_lines()
    top.process.send_signal(signal.SIGINT)  # it is not its controlling terminal
    assert top.end() == 130
    assert top.edits_lines()
    assert b"\x1b[?1049l" in top.received  # back from the second screen
    assert b"Traceback" not in top.received


def test_a_window_that_is_closed_ends_it(top: Terminal) -> None:
    top.until("> done")
    top.hang_up()
    assert top.process.wait(30) == 0


def oomrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomrun", "top", *words],
        cwd=folder, text=True, capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


def test_a_pipe_gets_plain_text(folder: Path) -> None:
    done = oomrun(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    first, second = done.stdout.split("\n\n")
    assert "completed" in first
    assert "limit 600MiB" in first
    assert second.startswith("interrupted while training")
    assert max(map(len, done.stdout.splitlines())) <= 100
    alone = oomrun(folder, "going").stdout
    # The clock goes on meanwhile, in the second line.
    assert alone.splitlines()[2:] == second.splitlines()[2:]


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json"]) == 0
    done, going = json.loads(capsys.readouterr().out)
    assert (done["path"], done["standing"]) == ("runs/done", "completed")
    assert (going["standing"], going["supervisor_alive"]) == ("interrupted", False)
    assert going["step"] == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["nowhere"],
            "nowhere: there is no such run (there are runs/done, runs/going)",
        ),
        (["runs"], "runs is no run directory: it holds no journal"),
    ],
)
def test_what_is_no_run(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *words]) == 2
    assert capsys.readouterr().err == f"oomrun: {said}\n"


def test_no_runs_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert "there are no runs under runs/" in capsys.readouterr().err
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("view", VIEWS.values())
@pytest.mark.parametrize("width", [20, 63, 100])
@pytest.mark.parametrize("height", [1, 4, 12, 40])
def test_a_picture_always_fits(
    glyphs: Glyphs, view: str, width: int, height: int, folder: Path
) -> None:
    for number in range(5):
        write(folder / "runs" / f"r{number}" / "journal.jsonl", scenarios.opening())
    watching = Watching([])
    watching.look()
    for selected in range(len(watching.runs)):
        shown = Shown(view, selected)
        lines = picture(
            watching.runs, shown, width=width, height=height, now=scenarios.START,
            glyphs=glyphs,
        )  # fmt: skip
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)
        if view == "overview":
            name = watching.runs[selected].name
            assert any(line.plain.startswith(f"> {name}") for line in lines)


def test_every_key(folder: Path) -> None:
    shown = Shown()
    for key, selected in (("down", 1), ("j", 2), ("n", 0), ("up", 2), ("k", 1)):
        assert shown.press(key, 3)
        assert shown.selected == selected
    for key, view in (("enter", "run"), ("escape", "overview"), ("e", "events")):
        assert shown.press(key, 3)
        assert shown.view == view
    assert shown.press("?", 3)
    assert shown.press("down", 0)
    assert not shown.press("q", 3)


def test_a_damaged_journal_is_said_and_the_others_are_seen(folder: Path) -> None:
    with (folder / "runs" / "going" / "journal.jsonl").open("a") as file:
        file.write("{broken\n{}\n")
    watching = Watching([])
    watching.look()
    done, going = watching.runs
    assert done.standing == "completed"
    assert "damaged" in going.trouble
    lines = picture(
        watching.runs, Shown(), width=100, height=30, now=0.0, glyphs=UNICODE
    )
    assert any("damaged" in line.plain for line in lines)


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = Follower(path)
    assert follower.news() == ([], False)
    events = scenarios.opening()
    write(path, events[:3])
    assert follower.news() == (events[:3], True)
    assert follower.news() == ([], False)
    line = json.dumps(event_json.to_json(events[3])) + "\n"
    with path.open("a") as file:
        file.write(line[:20])  # a writer in the middle of it
        file.flush()
        assert follower.news() == ([], False)
        file.write(line[20:])
    assert follower.news() == (events[3:4], False)


def test_a_follower_sees_another_run_in_the_same_place(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = Follower(path)
    write(path, scenarios.whole())
    follower.news()
    path.rename(tmp_path / "old")
    write(path, scenarios.opening())
    assert follower.news() == (scenarios.opening(), True)
    path.write_text("")
    assert follower.news() == ([], True)


def test_a_follower_that_may_not_read(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(JournalError, match="cannot be read"):
        Follower(tmp_path / "journal.jsonl").news()


def test_a_run_that_runs_is_not_interrupted(folder: Path) -> None:
    from oomrun.rundir import RunDir

    run_dir = RunDir(folder / "runs" / "going")
    watching = Watching(["going"])
    with run_dir.locked():
        watching.look()
        assert watching.runs[0].standing == "training"
    watching.look()
    assert watching.runs[0].standing == "interrupted"
