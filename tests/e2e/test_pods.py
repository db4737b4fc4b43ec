"""Two pods that train together, played on this machine: the very commands, two hosts.

Covers: what ``render`` prints for several pods trains one model, goes on where a pod is
killed or taken away, whichever it is. Does not cover: a cluster's network and volumes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import several_workers

from oomrun.cli import main
from oomrun.core import events as ev
from oomrun.kubernetes import submission
from oomrun.stops import STOPPED_EXIT_CODE
from pods import Pod

SCRIPT = (
    several_workers.START
    + """
model = keras.Sequential([
    keras.Input((24,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=96, epochs=3, verbose=0, callbacks=[slow])
np.savez(f"weights-{rank}.npz", *model.get_weights())
"""
)
JOB = """\
name: small
script: train.py
strategy: {strategy}
devices: {cpu: 1, memory: 300MiB}
checkpoint: {every: 2 steps}
metrics: {listen: none}
kubernetes:
  image: x
  pods: 2
  volume: {size: 1GiB, access: ReadWriteMany}
"""
QUICK = {"SLOW": "0"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


class Pods:
    """Both pods, of which each may be replaced."""

    def __init__(self, folder: Path, pods: list[Pod]) -> None:
        self.folder, self.pods = folder, pods
        self.run = jobs.Job(folder / "volume")
        self.processes: list[subprocess.Popen[bytes] | None] = [None, None]

    def start(self, index: int, env: dict[str, str]) -> None:
        self.processes[index] = self.pods[index].start(env)

    def __getitem__(self, index: int) -> subprocess.Popen[bytes]:
        found = self.processes[index]
        assert found is not None
        return found

    def codes(self) -> list[int]:
        return [self[index].wait(400) for index in (0, 1)]

    def everything(self) -> str:
        said = "".join(pod.said() for pod in self.pods)
        logs = sorted(self.run.run_dir.path.glob("attempts/*/*.log"))
        return said + "".join(f"--- {p}\n{p.read_text()[-3000:]}" for p in logs)


@pytest.fixture
def pods(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Iterator[Pods]:
    strategy = getattr(request, "param", "horovod")
    monkeypatch.chdir(tmp_path)
    # On this machine all share the ports.
    monkeypatch.setattr(submission, "MEETING_PORT", free_port())
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB.replace("{strategy}", strategy))
    assert main(["render", "job.yaml", "--json"]) == 0
    objects = json.loads(capsys.readouterr().out)["items"]
    (tmp_path / "volume").mkdir()
    made = [
        Pod(
            tmp_path / f"pod-{index}",
            objects,
            index=index,
            workspace=tmp_path / "volume",
            names={"small-0.small": "127.0.0.1"},
        )
        for index in (0, 1)
    ]
    both = Pods(tmp_path, made)
    yield both
    for process in both.processes:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()


def trained_as_one(pods: Pods) -> None:
    plain = several_workers.alone(pods.folder / "plain", SCRIPT)
    several_workers.trained_as_one(pods.run, plain, 2)


@pytest.mark.parametrize(
    ("pods", "killed"),
    [
        pytest.param("horovod", 0, marks=pytest.mark.slow),
        ("horovod", 1),
        pytest.param("multi_worker_mirrored", 1, marks=pytest.mark.slow),
    ],
    indirect=["pods"],
)
def test_a_pod_is_killed(pods: Pods, killed: int) -> None:
    for index in (0, 1):
        pods.start(index, {"SLOW": "1"})
    pods.run.wait_for(ev.CheckpointSaved)
    pods[killed].kill()
    assert pods[killed].wait() == -signal.SIGKILL
    # As the Job does: another pod of this index.
    pods.start(killed, QUICK)
    assert pods.codes() == [0, 0], pods.everything()
    trained_as_one(pods)
    assert [e.attempt for e in pods.run.events(ev.AttemptStarted)] == [1, 2]
    (restored, *_) = pods.run.events(ev.Restored)
    assert restored.step >= 2
    if killed:
        (ended, _) = pods.run.events(ev.AttemptEnded)
        assert ended.summary.startswith("worker 1: the worker is gone with member 1")
    # Who comes after the end finds on the volume that it is done.
    pods.start(1, QUICK)
    assert pods[1].wait(120) == 0


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1])
def test_a_pod_has_to_go(pods: Pods, taken: int) -> None:
    """All pods end so that it costs no retry, with a checkpoint; others go on."""
    for index in (0, 1):
        pods.start(index, {"SLOW": "1"})
    pods.run.wait_for(ev.Progressed)
    os.kill(pods[taken].pid, signal.SIGTERM)
    assert pods.codes() == [STOPPED_EXIT_CODE] * 2, pods.everything()
    (ended,) = pods.run.events(ev.AttemptEnded)
    assert ended.summary == "worker 0: stopped on request, with a checkpoint"
    for index in (0, 1):
        pods.start(index, QUICK)
    assert pods.codes() == [0, 0], pods.everything()
    trained_as_one(pods)
