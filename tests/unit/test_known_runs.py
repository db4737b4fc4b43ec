"""Which runs a machine knows of, whom it believes, and which of them are shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import scenarios
from oomrun import known_runs
from oomrun.cli.monitored import Monitored
from oomrun.core import events as ev
from oomrun.core.state import replay
from oomrun.journal import Journal
from oomrun.metrics.catalogue import registry_of
from oomrun.rundir import RunDir

END = scenarios.START + 41.3


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One's own folder, and none for all users."""
    return [tmp_path / "state" / "runs", tmp_path / "shared"]


def run_in(path: Path, events: Sequence[ev.Event] = ()) -> RunDir:
    """A run's folder with these events, the completed run's if there are none."""
    run_dir = RunDir(path)
    run_dir.create()
    with Journal(run_dir.journal) as journal:
        for event in events or scenarios.whole():
            journal.append(event)
    return run_dir


def test_a_run_is_found_where_it_was_left(tmp_path: Path, folders: list[Path]) -> None:
    one, other = run_in(tmp_path / "a" / "x"), run_in(tmp_path / "b" / "x")
    for run_dir in (one, other, one):
        known_runs.register(run_dir, folders)
    assert known_runs.find(folders) == [one, other]
    assert folders[0].stat().st_mode & 0o777 == 0o700
    assert not folders[1].exists()


def test_the_folder_for_all_users_is_used_where_it_is(
    tmp_path: Path, folders: list[Path]
) -> None:
    folders[1].mkdir()
    folders[1].chmod(0o1777)
    run_dir = run_in(tmp_path / "x")
    known_runs.register(run_dir, folders)
    assert known_runs.find(folders[1:]) == [run_dir]


def test_links_that_lead_nowhere_go_away(tmp_path: Path, folders: list[Path]) -> None:
    gone, old, kept = (run_in(tmp_path / name) for name in ("gone", "old", "kept"))
    for run_dir in (gone, old):
        known_runs.register(run_dir, folders)
    gone.path.rename(tmp_path / "elsewhere")
    os.utime(old.journal, (1, 1))
    assert known_runs.find(folders) == [old]
    known_runs.register(kept, folders)
    assert [link.name.split("-")[0] for link in folders[0].iterdir()] == ["kept"]


def test_only_links_to_runs_are_followed(tmp_path: Path, folders: list[Path]) -> None:
    run_dir = run_in(tmp_path / "x")
    known_runs.register(run_dir, folders)
    (folders[0] / "no-link").mkdir()
    (folders[0] / "relative").symlink_to("../../x")
    (folders[0] / "no-run").symlink_to(tmp_path)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "journal.jsonl")
    (folders[0] / "pipe").symlink_to(pipe)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "journal.jsonl").symlink_to(run_dir.journal)
    (folders[0] / "elsewhere").symlink_to(secret)
    assert known_runs.find(folders) == [run_dir]


def test_a_folder_that_others_can_write_into_is_not_believed(
    tmp_path: Path, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    known_runs.register(run_in(tmp_path / "x"), folders)
    folders[0].chmod(0o777)
    assert known_runs.find(folders) == []
    assert "mode 1777" in caplog.text
    folders[0].chmod(0o1777)
    assert len(known_runs.find(folders)) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("stranger", ["link", "folder", "journal"])
def test_a_link_is_believed_where_one_user_owns_it_all(
    stranger: str, tmp_path: Path, folders: list[Path]
) -> None:
    """Else a link would have us read what its owner may not."""
    run_dir = run_in(tmp_path / "x")
    known_runs.register(run_dir, folders)
    (link,) = folders[0].iterdir()
    paths = {"link": link, "folder": run_dir.path, "journal": run_dir.journal}
    os.lchown(paths.pop(stranger), 12345, -1)
    assert known_runs.find(folders) == []
    assert known_runs.find(folders, all_users=True) == []
    for path in paths.values():
        os.lchown(path, 12345, -1)
    assert known_runs.find(folders) == []
    assert known_runs.find(folders, all_users=True) == [run_dir]


def test_a_folder_that_cannot_be_made_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known_runs.register(run_in(tmp_path / "x"), [tmp_path / "file" / "runs"])
    assert known_runs.find([tmp_path / "file" / "runs"]) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, ["/s/oomrun/runs"]),
        ({"XDG_STATE_HOME": "s", "HOME": "/h"}, ["/h/.local/state/oomrun/runs"]),
        ({}, []),
    ],
)
def test_where_the_folders_are(
    environment: dict[str, str], expected: list[str]
) -> None:
    found = known_runs.folders_of(environment)
    assert found == [*map(Path, expected), known_runs.SHARED]


def test_a_run_is_shown_for_a_while_after_its_end(
    tmp_path: Path, folders: list[Path]
) -> None:
    known_runs.register(run_in(tmp_path / "x"), folders)
    now = END + 899
    shown = Monitored(folders, keep_s=900, clock=lambda: now)
    assert [state.state for state in shown.states()] == ["completed"]
    now = END + 901
    assert shown.states() == []


def test_a_run_is_shown_while_somebody_runs_it(
    tmp_path: Path, folders: list[Path]
) -> None:
    events = scenarios.whole()
    run_dir = run_in(tmp_path / "x", events[:8])
    known_runs.register(run_dir, folders)
    shown = Monitored(folders, keep_s=900, clock=lambda: END)
    assert shown.states() == []
    with run_dir.locked(), Journal(run_dir.journal) as journal:
        (state,) = shown.states()
        assert state == replay(events[:8])
        for event in events[8:]:
            journal.append(event)
        (state,) = shown.states()
        assert state == replay(events)


def test_two_runs_of_one_name_are_two_runs(tmp_path: Path, folders: list[Path]) -> None:
    events = scenarios.whole()
    for number in (1, 2):
        began = ev.RunStarted(
            at=scenarios.START, run_id=f"{number}" * 32, name="x", version="1", seed=1,
            mathematics={},
        )  # fmt: skip
        run_dir = run_in(tmp_path / f"{number}", [began, *events[1:]])
        known_runs.register(run_dir, folders)
    shown = Monitored(folders, keep_s=900, clock=lambda: END)
    assert [state.name for state in shown.states()] == ["x", "x-222222"]
    (tmp_path / "1").rename(tmp_path / "moved")
    assert [state.name for state in shown.states()] == ["x-222222"]
    registry = registry_of(shown.states)
    assert registry.get_sample_value("oomrun_steps_total", {"run": "x-222222"})


def test_a_damaged_journal_is_said_once_and_others_are_shown(
    tmp_path: Path, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    for run_dir in (broken, whole):
        known_runs.register(run_dir, folders)
    broken.journal.write_text("no json\n" * 2)
    shown = Monitored(folders, keep_s=900, clock=lambda: END)
    assert len(shown.states()) == len(shown.states()) == 1
    assert caplog.text.count("a run is left out") == 1
