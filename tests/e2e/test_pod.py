"""The pod's very command, run here as a kubelet would: files laid out, words filled in.

Covers: that what ``render`` prints runs, ends with the job's exit code, and goes on in
the next pod. Does not cover: a container, its user, its read-only root.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from oomrun.cli import main
from oomrun.stops import STOPPED_EXIT_CODE
from pods import Pod

GO = """\
#!/bin/sh
echo "$1" > said
if [ -e "$2" ]; then exit "$(cat "$2")"; fi
touch started
exec sleep 300
"""
JOB = """\
name: small
command: [./scripts/go.sh, "${WORD}", code]
devices: cpu
recovery: {max_restarts: {crash: 0}}
metrics: {listen: none}
kubernetes: {image: x, volume: {size: 1GiB}}
"""


@pytest.fixture
def pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Pod:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/go.sh").write_text(GO)
    (tmp_path / "job.yaml").write_text(JOB)
    assert main(["render", "job.yaml", "--json"]) == 0
    objects = json.loads(capsys.readouterr().out)["items"]
    return Pod(tmp_path / "pod", objects)


def test_the_job_s_exit_code_is_the_pod_s(pod: Pod) -> None:
    (pod.workspace / "code").write_text("0")
    assert pod.start({"WORD": "of the $(POD)"}).wait(240) == 0
    assert (pod.workspace / "said").read_text() == "of the $(POD)\n"
    assert (pod.workspace / "runs/small/journal.jsonl").exists()
    # Another pod of the same job finds on the volume that it is done.
    (pod.workspace / "said").unlink()
    assert pod.start({"WORD": "of the $(POD)"}).wait(240) == 0
    assert not (pod.workspace / "said").exists()


def test_a_training_that_failed_ends_with_1(pod: Pod) -> None:
    (pod.workspace / "code").write_text("7")
    assert pod.start({"WORD": "x"}).wait(240) == 1


def test_a_variable_that_the_pod_does_not_have(pod: Pod) -> None:
    env = {key: value for key, value in os.environ.items() if key != "WORD"}
    assert "WORD" not in env
    assert pod.start({}).wait(240) == 2


def test_a_pod_that_has_to_go_ends_with_75(pod: Pod) -> None:
    process = pod.start({"WORD": "x"})
    try:
        while not (pod.workspace / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(240) == STOPPED_EXIT_CODE
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
