"""``validate``, ``schema`` and ``init``: files, exit codes, what is printed where."""

import argparse
import json
from pathlib import Path

import pytest

from oomrun.cli import jobfile_commands
from oomrun.core.errors import SpecError

GOOD = "name: digits\nscript: train.py\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("model.fit(x, y, batch_size=256)\n")
    (tmp_path / "job.yaml").write_text(GOOD)
    return tmp_path


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="oomrun")
    jobfile_commands.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    code: int = args.handler(args)
    return code


def test_a_valid_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", "job.yaml") == 0
    assert capsys.readouterr() == ("job.yaml: valid (digits)\n", "")


def test_problems_are_shown_with_their_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text("name: Digits\nscript: missing.py\n")
    assert call("validate", "job.yaml") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "job.yaml:1:7: name: expected lower-case letters, digits and '-', at most 63"
        " characters, got 'Digits' (did you mean digits?)\n"
        "    name: Digits\n"
        "          ^\n"
        "job.yaml:2:9: script: no such file: missing.py"
        " (paths are relative to the job file)\n"
        "    script: missing.py\n"
        "            ^\n"
        "2 problems\n"
    )


def test_the_same_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", "job.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "errors": []}
    (folder / "job.yaml").write_text("name: a\nscrip: train.py\nscript: train.py\n")
    assert call("validate", "job.yaml", "--json") == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "valid": False,
        "errors": [
            {
                "file": "job.yaml",
                "line": 2,
                "column": 1,
                "path": "scrip",
                "message": "expected a known key, got scrip",
                "hint": "did you mean script?",
            }
        ],
    }


def test_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", "job.yaml", "--set", "memory.headroom=5%") == 0
    assert call("validate", "job.yaml", "--set", "memory.headroom=5") == 2
    assert "--set:1:17: memory.headroom: " in capsys.readouterr().err


def test_the_script_is_looked_for_beside_the_job_file(folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "job.yaml").write_text(GOOD)
    assert call("validate", "jobs/job.yaml") == 2
    (folder / "jobs" / "train.py").write_text("")
    assert call("validate", "jobs/job.yaml") == 0
    assert jobfile_commands.load_job_file("jobs/job.yaml").name == "digits"


@pytest.mark.parametrize("script", [".", "x" * 300, "train.py/x"])
def test_what_is_no_script(folder: Path, script: str) -> None:
    (folder / "job.yaml").write_text(f"name: a\nscript: {script}\n")
    with pytest.raises(SpecError, match="no such file"):
        jobfile_commands.load_job_file("job.yaml")


@pytest.mark.parametrize("path", ["none.yaml", ".", "train.py/x", "\0", "x" * 300])
def test_unreadable_files(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{path}:1:1: cannot read the job file: ")
    assert err.count("\n") == 1
    assert call("validate", path, "--json") == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["line"] == 1


def test_a_path_that_is_not_utf8(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "\udcff.yaml").write_text(GOOD)
    assert call("validate", "\udcff.yaml") == 0
    assert capsys.readouterr().out == "\\udcff.yaml: valid (digits)\n"


def test_not_utf8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_bytes(b"name: a\nscript: \xff.py\n")
    assert call("validate", "job.yaml") == 2
    assert "job.yaml:2:9: expected UTF-8, got the byte 0xff" in capsys.readouterr().err


def test_the_caret_finds_its_place_in_a_long_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ", ".join(["x"] * 200)
    (folder / "job.yaml").write_text(GOOD + f"args: [{args}, 012, {args}]\n")
    assert call("validate", "job.yaml") == 2
    _, line, caret = capsys.readouterr().err.splitlines()
    assert line[caret.index("^") :].startswith("012,")
    assert len(line) <= 104


def test_init_writes_a_valid_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("init", "train.py", "-o", "new.yaml", "--name", "My Job") == 0
    assert "new.yaml: written" in capsys.readouterr().out
    assert "256 is what the script seems to say" in (folder / "new.yaml").read_text()
    spec = jobfile_commands.load_job_file("new.yaml")
    assert spec.name == "my-job"
    assert call("validate", "new.yaml") == 0


def test_init_names_the_job_after_the_folder_of_a_train_py(folder: Path) -> None:
    (folder / "Mnist CNN").mkdir()
    (folder / "Mnist CNN" / "train.py").write_text("batch_size=1\nbatch_size=2\n")
    assert call("init", "Mnist CNN/train.py", "-o", "new.yaml") == 0
    assert jobfile_commands.load_job_file("new.yaml").name == "mnist-cnn"
    assert "seems to say" not in (folder / "new.yaml").read_text()


def test_init_overwrites_only_by_force(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("init", "train.py") == 2
    assert "exists already" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == GOOD
    assert call("init", "train.py", "--force") == 0
    assert (folder / "job.yaml").read_text() != GOOD


@pytest.mark.parametrize(
    ("script", "output"),
    [("none.py", "new.yaml"), (".", "new.yaml"), ("train.py", "no/new.yaml")],
)
def test_init_with_wrong_paths(
    script: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("init", script, "-o", output) == 2
    assert capsys.readouterr().err.startswith("oomrun init: ")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("validate", "--help")
    text = capsys.readouterr().out
    assert "--set PATH=VALUE" in text
    assert "--json" in text
