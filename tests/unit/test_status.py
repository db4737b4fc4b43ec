"""``oomrun status``: what it says of a run, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import scenarios
from oomrun.cli import status_command
from oomrun.core import events as ev
from oomrun.core.state import replay
from oomrun.core.status import devices, standing, status_json
from oomrun.journal import Journal
from oomrun.rundir import RunDir

MIB = scenarios.MIB

KEYS = [
    "name", "run_id", "state", "exit_code", "reason", "attempts", "restarts",
    "oom_events", "in_process_recoveries", "oom_report", "step", "samples",
    "epoch", "epochs",
    "steps_per_epoch", "loss", "global_batch_size", "devices", "breakdown",
    "checkpoint", "mirror", "levers", "optimizer", "left_out", "last_decision",
    "notes",
]  # fmt: skip


def write(folder: Path, events: list[ev.Event]) -> RunDir:
    """A run directory whose journal holds ``events``."""
    run_dir = RunDir(folder)
    run_dir.create()
    with Journal(run_dir.journal) as journal:
        for event in events:
            journal.append(event)
    return run_dir


def call(*arguments: str) -> int:
    """Runs the command as the command line would."""
    parser = argparse.ArgumentParser()
    status_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["status", *arguments])
    code: int = args.handler(args)
    return code


def test_json_of_a_completed_run() -> None:
    body = status_json(replay(scenarios.whole()))
    assert list(body) == KEYS
    assert body["state"] == "completed"
    assert body["restarts"] == dict(oom=1, crash=0, preemption=0, hang=0, leak=0)
    assert (body["oom_events"], body["in_process_recoveries"]) == (2, 1)
    assert (body["step"], body["samples"], body["epoch"]) == (100, 25600, 5)
    assert body["checkpoint"]["name"] == "step-00000040"
    assert body["devices"] == [
        {
            "id": "cpu:0",
            "kind": "cpu",
            "limit_bytes": 600 * MIB,
            "budget_bytes": 552 * MIB,
            "share": 256,
            "micro_batch_size": 64,
            "accumulation_steps": 4,
            "predicted_peak_bytes": 235 * MIB,
            "predicted_peak_high_bytes": 293 * MIB,
            "peak_bytes": 410 * MIB,
        }
    ]


def test_devices_show_the_current_micro_batch_not_the_planned_one() -> None:
    (device,) = devices(replay(scenarios.opening()))
    assert (device.micro_batch_size, device.accumulation_steps) == (128, 2)


def test_a_prediction_never_rests_on_the_size_that_it_predicts() -> None:
    (device,) = devices(replay([*scenarios.opening(), *scenarios.middle()[:3]]))
    assert device.micro_batch_size == 128
    assert device.predicted_peak_bytes is None  # only 128 itself was measured


def test_an_empty_journal_is_a_pending_run() -> None:
    body = status_json(replay([]))
    assert (body["state"], body["devices"], body["checkpoint"]) == ("pending", [], None)


@pytest.mark.parametrize(
    ("cause", "device"), [("device_oom", "cpu:0"), ("host_oom", "host")]
)
def test_an_oom_that_killed_the_worker_unsaid_is_counted(
    cause: str, device: str
) -> None:
    ended = ev.AttemptEnded(
        at=scenarios.START + 6, attempt=1, cause=cause, summary="SIGSEGV",
        exit_code=None, signal=11,
    )  # fmt: skip
    state = replay([*scenarios.opening(), ended])
    assert state.oom_events == 2  # one was reported, and mended in process
    assert state.last_oom is not None
    assert (state.last_oom.device, state.last_oom.phase) == (device, "unknown")
    # 256 failed before; what failed now is the 128 that it was changed to.
    assert state.micro_batch_failed == (128 if cause == "device_oom" else 256)


def test_an_oom_that_was_reported_is_counted_once() -> None:
    assert replay(scenarios.whole()).oom_events == 2


@pytest.mark.parametrize("cut", range(len(scenarios.whole()) + 1))
def test_every_prefix_of_a_journal_has_a_status(cut: int) -> None:
    state = replay(scenarios.whole()[:cut])
    json.dumps(status_json(state), allow_nan=False)
    assert standing(state, supervisor_alive=False)


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", scenarios.opening())
    assert call(str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "interrupted while training" in out
    assert "`oomrun job.yaml` resumes it" in out


def test_a_run_with_a_supervisor_is_not_interrupted(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", scenarios.opening())
    assert not status_command.supervisor_alive(run_dir)
    hold = (
        "import sys, pathlib; from oomrun.rundir import RunDir\n"
        "with RunDir(pathlib.Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run_dir.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert status_command.supervisor_alive(run_dir)
        holder.communicate()
    assert not status_command.supervisor_alive(run_dir)


def test_a_name_is_looked_up_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs" / "digits", scenarios.whole())
    monkeypatch.chdir(tmp_path)
    assert call("digits", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert list(body) == [*KEYS, "supervisor_alive"]
    assert body["supervisor_alive"] is False


def test_text_of_a_completed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", scenarios.whole())
    assert call(str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "digits: completed, exit code 0: the script finished" in out
    assert "micro-batch 64 x 4 (global 256)" in out
    assert "ran out 2 times, 1 recovered in process" in out
    assert "2 (restarts: 1 by oom)" in out


@pytest.mark.parametrize("kind", ["missing", "empty folder", "file"])
def test_what_is_no_run_is_one_line_and_exit_code_2(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("no run")
    assert call(str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(path) in captured.err


def test_a_damaged_journal_is_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write(tmp_path / "run", scenarios.opening())
    run_dir.journal.write_bytes(b"rubbish\n" + run_dir.journal.read_bytes())
    assert call(str(run_dir.path)) == 4
    assert "journal.jsonl:1" in capsys.readouterr().err
