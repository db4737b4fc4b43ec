"""docs/kubernetes.md, step by step: each command in it is run, as it stands there.

Covers: every block of ``sh`` by bash, with the real kubectl and the Python client, and
every job file. Does not cover: pip, and a cluster: the server is the tests' own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubernetes_jobs as jobs
import programs
from fake_cluster import FakeCluster
from oomrun.core import jobfile

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "kubernetes.md"


def blocks(language: str) -> list[str]:
    text = DOCUMENT.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


class Controllers:
    """What a cluster makes of each Job: a pod that prints a line and ends."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        cluster.lives = [self._live] * 20

    def _live(self) -> None:
        *_, (_, _, name) = [key for key in self.cluster.objects if key[0] == "jobs"]
        pod = f"{name}-0-a"
        self.cluster.logs[pod] = f"{pod} printed this\n"
        self.cluster.add_pod(name, pod, {"phase": "Succeeded"})
        self.cluster.finish(name, "Complete")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder, with the repository's ``k8s`` in it and ``oomrun`` installed."""
    (job, *_) = blocks("yaml")
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "train.py").write_bytes(jobs.SCRIPT.content)
    (tmp_path / "k8s").symlink_to(ROOT / "k8s")
    program = tmp_path / "bin" / "oomrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m oomrun "$@"\n')
    program.chmod(0o755)
    server = FakeCluster()
    Controllers(server)
    server.write_config(tmp_path / "kubeconfig")
    yield tmp_path
    server.close()


def run(folder: Path, script: str) -> str:
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{programs.PATH}",
        "HOME": str(folder),
        "KUBECONFIG": str(folder / "kubeconfig"),
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], cwd=folder, env=env,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


#: What each block is about, in their order, and what it prints in the end.
BLOCKS = [
    ("the commands", "digits-cnn-0-a printed this"),
    ("by kubectl", "job.batch/digits-cnn condition met"),
    ("a watcher on the cluster", "digits-cnn-watch-0-a printed this"),
    ("checking manifests", "kind: Job"),
    ("the overlays", "kind: Job"),
]


@programs.needs_kubectl
@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=[name for name, _ in BLOCKS])
def test_the_commands_do_what_the_document_says(folder: Path, index: int) -> None:
    script = blocks("sh")[index]
    lines = [line for line in script.splitlines() if not line.startswith("pip ")]
    assert BLOCKS[index][1] in run(folder, "\n".join(lines))


def test_there_is_no_other_block() -> None:
    assert len(blocks("sh")) == len(BLOCKS)
    fences = re.findall(r"^```(\w*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert set(fences) == {"", "sh", "yaml"}
    assert fences.count("") == len(fences) / 2


def test_its_job_files_are_right() -> None:
    for text in blocks("yaml"):
        found = jobfile.examine(text, filename="job.yaml", environment={})
        assert not found.problems
        assert found.spec is not None
        assert found.spec.kubernetes is not None
