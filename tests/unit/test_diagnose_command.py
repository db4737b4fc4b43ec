"""``oomrun diagnose``: a log, many logs, and what is no log."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from oomrun.cli import main

OOM = (
    "ResourceExhaustedError: OOM when allocating tensor with shape[64,128] and type "
    "float on /job:localhost/replica:0/task:0/device:GPU:2 by allocator GPU_2_bfc\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(f"Epoch 1/3\n{OOM}")
    return path


def test_a_log_is_told_to_a_person(log: Path, capsys: Any) -> None:
    assert main(["diagnose", str(log), "--exit-code", "1"]) == 0
    said = capsys.readouterr().out
    assert "the device ran out of memory" in said
    assert "shape [64, 128] of float, on GPU:2" in said
    assert "use a smaller micro-batch" in said


def test_json(log: Path, capsys: Any) -> None:
    assert main(["diagnose", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["is_oom"], found["kind"]) == (True, "gpu_allocator")
    assert (found["device"], found["shape"]) == ("GPU:2", [64, 128])


def test_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    piped = tmp_path / "piped"
    piped.write_bytes(OOM.encode("utf-16"))
    with piped.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["diagnose", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "GPU:2"


def test_many_logs(tmp_path: Path, capsys: Any) -> None:
    many = tmp_path / "many.jsonl"
    lines = [
        {"id": "a", "text": OOM, "exit_code": 1, "evidence": None},
        {"text": "x", "exit_code": -9, "evidence": {"cgroup_oom_kill": 1}},
        {"text": "fine", "exit_code": 0},
    ]
    many.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["diagnose", "--jsonl", str(many)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in found] == ["gpu_allocator", "host_killed", "not_oom"]
    assert found[0]["id"] == "a"
    wanted = {"is_oom", "kind", "device", "shape", "dtype", "requested_bytes", "levers"}
    assert all(wanted | {"summary"} <= set(row) for row in found)


def test_a_line_that_is_no_log_is_named_and_the_others_are_read(
    tmp_path: Path, capsys: Any
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_bytes(
        b'{"text": 3}\nnonsense\n{"text": "x", "exit_code": "1"}\n\n'
        b'{"text": "x", "evidence": []}\n{"text": "caf\xe9 MemoryError"}\n'
    )
    assert main(["diagnose", "--jsonl", str(many)]) == 2
    said = capsys.readouterr()
    found = [json.loads(line) for line in said.out.splitlines()]
    assert ["error" in row for row in found] == [True, True, True, True, False]
    assert f'{many}:1: expected an object with a "text"' in said.err
    assert f"{many}:2: no JSON" in said.err
    assert f"{many}:5: evidence: expected an object or null" in said.err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (bytes(range(256)) * 40, "it is binary, not a log"),
        (gzip.compress(b"MemoryError"), "gzip -dc LOG | oomrun diagnose -"),
    ],
    ids=["empty", "binary", "compressed"],  # gzip writes the time into it
)
def test_what_is_no_log(content: bytes, why: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 2
    assert why in capsys.readouterr().err


def test_an_empty_log_with_an_exit_code_is_something(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert main(["diagnose", str(path), "--exit-code", "137"]) == 0
    assert "SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "reads either LOG"),
        (["a", "--jsonl", "b"], "reads either LOG"),
        (["no/such.log"], "no/such.log: no such file or directory"),
        (["."], ".: is a directory"),
        (["a", "--exit-code", "many"], "expected an exit code from -64 to 255"),
        (["a", "--exit-code", "999"], "expected an exit code from -64 to 255"),
    ],
)
def test_what_is_wrong_with_a_command_line(
    arguments: list[str], why: str, capsys: Any
) -> None:
    assert main(["diagnose", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_log_that_breaks_terminals_does_not(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "odd.log"
    path.write_bytes(b"\x1b]0;title\x07MemoryError: \x1b[2J\xff\xfe\r\n")
    assert main(["diagnose", str(path)]) == 0
    said = capsys.readouterr().out
    assert "host memory ran out" in said
    assert "\x1b" not in said


def test_the_whole_of_a_long_log_is_looked_at(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "long.log"
    noise = "W0101 00:00:00.000000 1 chatty.cc:1] nothing to see\n"
    path.write_text(noise * 12_000 + OOM + noise * 12_000)
    assert main(["diagnose", str(path), "--exit-code", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [64, 128]


def test_text_of_a_pipe_is_bytes(log: Path) -> None:
    from oomrun.cli.log_file import excerpt

    assert excerpt(io.BytesIO(log.read_bytes())).size_bytes == log.stat().st_size
