"""The command line: finding the command, help, errors, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomrun import __version__
from oomrun.cli import COMMANDS, Command, build_parser, main
from oomrun.cli.completion import script

JOB = "name: x\nscript: t.py\ndevices: {cpu: 1, memory: [100MiB]}\nbatch: {global: 8}\n"
HEAVY = ("tensorflow", "keras", "rich", "prometheus_client", "psutil", "pynvml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "t.py").touch()
    return tmp_path


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_command(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name:<10} {command.arguments:<8} {command.summary}\n" in said


def test_no_argument_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: oomrun JOB")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"oomrun {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plam", "job.yaml"], "did you mean plan?"),
        (["wibble"], "there is no command and no job file 'wibble'"),
        (["plan"], "the following arguments are required: JOB"),
        (["plan", "job.yaml", "--wrong"], "unrecognized arguments: --wrong"),
        (["job.yaml", "--grace", "soon"], "'soon' is no time such as 30s"),
        (["job.yaml", "--grace", "30"], "add a unit: 30s or 30min"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["plan", "job.yaml", "--set", "batch.global=x"], "batch.global"),
    ],
)
def test_a_wrong_command_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_command_s_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith("usage: oomrun")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_a_function(name: str) -> None:
    words = {
        "JOB": ["a.yaml"], "RUN_DIR": ["d"], "SCRIPT": ["t.py"], "SHELL": ["zsh"],
        "export": ["export"],
        "MANIFEST": ["m.yaml"],
    }  # fmt: skip
    arguments = words.get(COMMANDS[name].arguments, [])
    args = build_parser([name]).parse_args([name, *arguments])
    assert callable(getattr(args, "handler", None) or args.run)


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["plan", "job.yaml", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["strategy"] == "single"
    assert made["strategy_reason"]
    assert made["global_batch_size"] == 8
    (device,) = made["devices"]
    assert set(device) >= {
        "id", "kind", "limit_bytes", "budget_bytes", "share", "micro_batch_size",
        "accumulation_steps", "predicted_peak_bytes", "predicted_peak_high_bytes",
    }  # fmt: skip
    assert device["limit_bytes"] == 100 * 2**20
    assert device["predicted_peak_bytes"] is None
    assert made["notes"]


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.yaml"]) == 0
    said = capsys.readouterr().out
    assert "single (auto: there is one device" in said
    assert "8 (from the job file)" in said
    assert "100MiB" in said


def test_a_plan_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    setting = "devices.memory=[1MiB]"
    code = main(["plan", "job.yaml", "--set", setting, "--set", "memory.headroom=1MiB"])
    assert code in (2, 3)
    assert "Traceback" not in capsys.readouterr().err


FAILING = """
from oomrun.core.errors import InfeasiblePlanError

def add_parser(subparsers):
    parser = subparsers.add_parser("fail")
    parser.add_argument("error")
    parser.set_defaults(handler=fail)

def fail(args):
    raise eval(args.error)
"""


@pytest.fixture
def failing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more command, which fails as it is told."""
    (folder / "failing_command.py").write_text(FAILING)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(COMMANDS, "fail", Command("", "failing_command", "", ""))
    monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("InfeasiblePlanError('too large')", 3, "oomrun: too large\n"),
        ("KeyboardInterrupt()", 130, ""),
    ],
)
def test_errors_end_in_their_exit_code(
    error: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", error]) == code
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("failing")
def test_an_error_of_our_own_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.delenv("OOMRUN_DEBUG", raising=False)
    assert main(["fail", "ZeroDivisionError('a\\nb')"]) == 4
    said = capsys.readouterr().err
    assert said.startswith("oomrun: internal error: ZeroDivisionError: a b; please")
    assert said.count("\n") == 1
    (log,) = folder.glob("oomrun-error-*.log")
    assert "Traceback" in log.read_text()
    monkeypatch.setenv("OOMRUN_DEBUG", "1")
    assert main(["fail", "ZeroDivisionError()"]) == 4
    assert "Traceback" in capsys.readouterr().err


def oomrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["validate", "schema", "status"])
def test_light_commands_import_nothing_heavy(command: str) -> None:
    words = {"validate": ["job.yaml"], "schema": [], "status": ["."]}[command]
    said = oomrun("-X", "importtime", "-m", "oomrun", command, *words).stderr
    loaded = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert "oomrun.cli" in loaded
    assert not loaded & set(HEAVY)


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m oomrun schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(shell: str) -> None:
    text = script(shell)
    for name in COMMANDS:
        assert name in text
    assert "allow-changes" in text
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("options", [["--run-dir", ""], ["--run-dir", "."]])
def test_a_run_does_not_lie_among_other_files(
    folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job.yaml", *options]) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == JOB
    assert {entry.name for entry in folder.iterdir()} == {"job.yaml", "t.py"}


@pytest.mark.parametrize(
    "command", ["validate job.yaml", "plan job.yaml", "schema", "status nowhere"]
)
def test_started_without_streams(command: str, folder: Path) -> None:
    line = f"exec {sys.executable} -m oomrun {command} >&- 2>&-"
    done = subprocess.run(["sh", "-c", line], cwd=folder)
    assert done.returncode == (2 if "nowhere" in command else 0)


def test_an_output_that_is_full(folder: Path) -> None:
    line = f"exec {sys.executable} -m oomrun plan job.yaml --json >/dev/full"
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 4
    assert done.stderr == (
        "oomrun: the output cannot be written: No space left on device\n"
    )
