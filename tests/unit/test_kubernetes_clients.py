"""Each way a pod ends, by the Python client and by kubectl: message and decision.

Both clients are the real ones; the server is the tests' own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_jobs as jobs
import programs
from fake_cluster import FakeCluster, lead_to
from oomrun.cli import main
from oomrun.kubernetes.cluster import ClusterError, connect
from oomrun.kubernetes.kubectl import Kubectl

# Few objects: each is a process of kubectl's.
SECTION = """kubernetes:
  image: x
  volume: {claim: runs}
  service_account: trainer
  gpu_memory: any
  memory: 8GiB
  memory_max: 20GiB
"""
Say = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    """One for all: kubectl asks a server that it does not know for its kinds."""
    found = FakeCluster()
    yield found
    found.close()


@pytest.fixture(
    params=["python", pytest.param("kubectl", marks=programs.needs_kubectl)]
)
def cluster(
    request: pytest.FixtureRequest,
    server: FakeCluster,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeCluster:
    server.forget()
    lead_to(server, tmp_path, SECTION, monkeypatch)
    # What kubectl has found out of the server is kept there.
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    if request.param == "kubectl":
        monkeypatch.setenv("PATH", programs.PATH)
        monkeypatch.setitem(sys.modules, "kubernetes", None)
        assert isinstance(connect(None, None), Kubectl)
    return server


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    said = {"exitCode": code, "reason": reason, "message": message}
    status = {"name": "worker", "state": {"terminated": said}}
    return {"phase": "Failed", "containerStatuses": [status]}


MEMORY = ["kubernetes.memory=12288MiB"]
PREEMPTED = {"type": "DisruptionTarget", "status": "True"}
#: How the pod ends; what `wait` ends with and says; what `submit --watch` changes, or
#: None where it leaves the job.
ENDS: dict[str, tuple[dict[str, Any], int, str, list[str] | None]] = {
    "OOMKilled 137": (
        ended(137, "OOMKilled"), 137, "for host memory (exit code 137)", MEMORY,
    ),
    "Evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low."},
        4, "was ended by its node (Evicted): The node was low.", [],
    ),
    "preempted": (
        {**ended(143), "conditions": [PREEMPTED]}, 143, "killed by signal 15", [],
    ),
    "1": (ended(1, message="oomrun: why"), 1, "(exit code 1): oomrun: why", None),
    "2": (ended(2), 2, "the job file or the command line is wrong", None),
    "3": (ended(3), 3, "nothing fits into the memory of its device", None),
    "4": (ended(4), 4, "the machine or oomrun itself failed", []),
    "75": (ended(75), 75, "was stopped, and another pod can go on", []),
    "137": (ended(137), 137, "was killed (SIGKILL)", []),
    "143": (ended(143), 143, "was killed by signal 15", []),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_an_end_and_what_follows(cluster: FakeCluster, capsys: Say, name: str) -> None:
    status, code, said, changed = ENDS[name]

    def fail() -> None:
        cluster.add_pod("digits", "digits-0-a", status)
        cluster.finish("digits", "Failed", "PodFailurePolicy")

    cluster.lives = [fail, lambda: cluster.finish("digits", "Complete")]
    watched = main(["submit", "job.yaml", "--watch"])
    error = capsys.readouterr().err
    assert said in error
    lines = Path("runs/digits.decisions.jsonl").read_text().splitlines()
    decided = [each for each in map(json.loads, lines) if each["do"] != "made"]
    assert len(decided) == 1
    assert said in decided[0]["reason"]
    if changed is None:
        assert watched == code
        assert "not submitted again: the job failed" in error
        assert decided[0]["do"] == "give_up"
        assert main(["wait", "job.yaml"]) == code
    else:
        assert watched == 0
        assert error.splitlines()[-1] == "oomrun: the job is complete"
        assert decided[0]["overrides"] == changed


WAITING = {"reason": "ImagePullBackOff", "message": "no such image"}
UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "said"),
    [
        pytest.param(
            {"containerStatuses": [{"name": "worker", "state": {"waiting": WAITING}}]},
            "cannot start: the image cannot be pulled: no such image",
            id="ImagePullBackOff",
        ),
        pytest.param(
            {"conditions": [UNSCHEDULABLE]},
            "no node takes the pod digits-0-a yet: 0/3 nodes are available",
            id="unschedulable",
        ),
    ],
)
def test_what_does_not_begin(
    cluster: FakeCluster, capsys: Say, status: dict[str, Any], said: str
) -> None:
    pending = {"phase": "Pending", **status}
    cluster.lives = [lambda: cluster.add_pod("digits", "digits-0-a", pending)]
    assert main(["submit", "job.yaml", "--watch", "--timeout", "0s"]) == 4
    assert said in capsys.readouterr().err
    assert cluster.names("jobs") == ["digits"]
    lines = Path("runs/digits.decisions.jsonl").read_text().splitlines()
    assert [json.loads(line)["do"] for line in lines] == ["made"]


def test_a_job_from_submit_to_cancel(
    cluster: FakeCluster, tmp_path: Path, capsys: Say
) -> None:
    cluster.logs["digits-0-a"] = "step 1\nüm\n"
    cluster.lives = [
        lambda: cluster.add_pod("digits", "digits-0-a", {"phase": "Running"})
    ]
    all_kinds = SECTION.replace("{claim: runs}", "{size: 1GiB}")
    jobs.write_job(tmp_path, all_kinds.replace("  service_account: trainer\n", ""))
    assert main(["submit", "job.yaml"]) == 0
    assert main(["submit", "job.yaml"]) == 4
    assert "has not ended" in capsys.readouterr().err
    assert main(["render", "job.yaml", "--json"]) == 0
    for wanted in json.loads(capsys.readouterr().out)["items"]:
        (kept,) = [o for o in cluster.objects.values() if o["kind"] == wanted["kind"]]
        metadata = {**wanted["metadata"], "namespace": "default"}
        assert {key: kept["metadata"][key] for key in metadata} == metadata
        assert kept.get("spec") == wanted.get("spec")
    assert main(["status", "--kubernetes", "job.yaml"]) == 0
    assert main(["logs", "--follow", "job.yaml"]) == 0
    assert capsys.readouterr().out == (
        "digits: running: the pod digits-0-a runs\nstep 1\nüm\n"
    )
    cluster.finish("digits", "Complete")
    assert main(["wait", "--follow", "job.yaml"]) == 0
    assert capsys.readouterr().out == "step 1\nüm\n"
    assert main(["cancel", "job.yaml"]) == 0
    assert {kind for kind, _, _ in cluster.objects} == {
        "persistentvolumeclaims",
        "pods",
    }
    assert main(["cancel", "job.yaml"]) == 2


def test_what_the_server_does_not_do(cluster: FakeCluster) -> None:
    found = connect(None, None)
    assert found.read("MPIJob", "none") is None
    assert list(found.log("none", follow=False)) == []
    cluster.forbidden = {"jobs"}
    with pytest.raises(ClusterError, match=r"cannot read Job a: .*no rights") as caught:
        found.read("Job", "a")
    assert not caught.value.may_pass
    cluster.forbidden = set()
    cluster.broken = 1
    with pytest.raises(ClusterError, match="cannot list Pod: come again") as caught:
        found.listed("Pod", {"a": "b"})
    assert caught.value.may_pass
    with pytest.raises(ClusterError, match="there is no way to a cluster"):
        connect("nowhere", None)


def test_a_server_that_is_not_there(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeCluster()
    monkeypatch.setenv("KUBECONFIG", str(other.write_config(tmp_path / "other")))
    other.close()
    found = connect(None, None)
    with pytest.raises(ClusterError, match="the cluster cannot be reached") as caught:
        found.read("Job", "a")
    assert caught.value.may_pass
