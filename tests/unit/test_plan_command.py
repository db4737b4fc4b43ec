"""``oomrun plan``: what it says without running anything, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomrun.cli import main
from oomrun.core import events as ev
from oomrun.core.jobfile import load
from oomrun.core.spec import mathematics
from oomrun.journal import Journal
from oomrun.rundir import RunDir
from scenarios import MIB
from scenarios import state_measured as seen

JOB = "name: x\nscript: t.py\ndevices: {cpu: 1, memory: [300MiB]}\n"
COMMAND = "name: c\ncommand: [python3]\nbatch: {global: 8}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "command.yaml").write_text(COMMAND)
    (tmp_path / "t.py").touch()
    return tmp_path


def has_run(folder: Path) -> None:
    """The job's run, at micro-batch 16 of 64."""
    run = RunDir(folder / "runs" / "x")
    run.create()
    spec = load(JOB, filename="job.yaml", environment={})
    memory = (ev.DeviceMemory(device="cpu:0", peak_bytes=200 * MIB),)
    with Journal(run.journal) as journal:
        for event in (
            ev.RunStarted(
                at=0.0, run_id="r", name="x", version="0", seed=1,
                mathematics=mathematics(spec),
            ),
            ev.AttemptStarted(at=0.0, attempt=1, plan={}),
            seen(),
            ev.Progressed(
                at=1.0, attempt=1, fit=1, step=1, samples=64, epoch=1, step_in_epoch=1,
                loss=None, window_steps=1, step_s=1.0, global_batch_size=64,
                micro_batch_size=16, memory=memory,
            ),
            ev.DecisionMade(
                at=2.0, attempt=1, action="restart", cause="oom", reason="",
                micro_batch_size=16,
            ),
        ):  # fmt: skip
            journal.append(event)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device-memory", "24GiB"], "--device-memory needs --measure too"),
        (["--device-memory", "24"], "'24' is no size such as 24GiB: add a unit: 24MiB"),
        (["--device-memory", "0GiB"], "is no memory at all"),
        (["--measure", "--device-memory"], "expected one argument"),
    ],
)
def test_mistakes(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "job.yaml", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_command_is_planned_but_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--measure", "command.yaml"]) == 0
    assert "a command cannot be measured" in capsys.readouterr().out
    words = ["plan", "--measure", "--device-memory", "1GiB", "command.yaml"]
    assert main(words) == 2
    assert "a command's steps are not oomrun's" in capsys.readouterr().err


def test_a_run_s_own_peak_is_taken_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_run(folder)
    assert main(["plan", "job.yaml", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    (device,) = made["devices"]
    assert (device["share"], device["micro_batch_size"]) == (64, 16)
    told = made["breakdown"]
    assert told["parts"]["optimizer"] == 20 * MIB
    assert sum(told["parts"].values()) == device["predicted_peak_bytes"] == 200 * MIB
    assert made["tried"] == []
    assert main(["plan", "job.yaml"]) == 0
    said = capsys.readouterr().out
    assert "at micro-batch 16 the peak is made of" in said
    assert "optimizer slots" in said
    assert "5MiB a sample" in said


def test_what_a_run_knows_is_enough_for_another_device(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_run(folder)
    words = ["plan", "job.yaml", "--device-memory", "24GiB", "--json"]
    assert main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["devices"][0]["kind"] == "gpu"
    assert made["source"] == "the graph of the step alone"
    assert main([*words[:-2], "600MiB"]) == 3
    assert "by the graph of its step" in capsys.readouterr().err


def test_variables_that_do_not_count_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "77")
    assert main(["plan", "job.yaml"]) == 0
    assert "note: TF_CPU_BFC_MEM_LIMIT_IN_MB=77 is not used" in capsys.readouterr().out
    assert main(["plan", "job.yaml", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["overruled"]
    assert "TF_CPU_BFC_MEM_LIMIT_IN_MB" in told
