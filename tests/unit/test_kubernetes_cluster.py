"""``oomrun submit`` and the like against a server, through the real Python client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_jobs as jobs
from fake_cluster import FakeCluster, lead_to
from oomrun.cli import main

SECTION = """kubernetes:
  image: x
  volume: {size: 1GiB}
  gpu_memory: any
  pod_monitor: {release: p}
"""
PLURALS = {
    "serviceaccounts", "configmaps", "persistentvolumeclaims", "networkpolicies",
    "podmonitors", "jobs",
}  # fmt: skip

Say = pytest.CaptureFixture[str]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    server = FakeCluster()
    lead_to(server, tmp_path, SECTION, monkeypatch)
    yield server
    server.close()


def running(**more: Any) -> dict[str, Any]:
    return {"phase": "Running", **more}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    said = {"exitCode": code, "reason": reason, "message": message}
    status = {"name": "worker", "state": {"terminated": said}}
    return {"phase": "Failed", "containerStatuses": [status]}


def test_submit_makes_what_render_prints(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["render", "job.yaml", "--json"]) == 0
    rendered = json.loads(capsys.readouterr().out)["items"]
    assert main(["submit", "job.yaml"]) == 0
    assert "submitted as the job digits in default" in capsys.readouterr().err
    assert {plural for plural, _, _ in cluster.objects} == PLURALS
    for made in rendered:
        (kept,) = [o for o in cluster.objects.values() if o["kind"] == made["kind"]]
        del kept["metadata"]["uid"], kept["metadata"]["namespace"]
        assert kept == made
    made_in_order = [path for verb, path in cluster.requests if verb == "POST"]
    assert made_in_order[-1].endswith("/jobs")


def test_a_dry_run_sends_nothing(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml", "--dry-run"]) == 0
    sent = capsys.readouterr().out
    assert main(["render", "job.yaml"]) == 0
    assert capsys.readouterr().out == sent
    assert cluster.requests == []


def test_the_namespace_of_the_job_file_and_of_the_context(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.write_config(tmp_path / "kubeconfig", namespace="mine")
    assert main(["submit", "job.yaml"]) == 0
    assert {namespace for _, namespace, _ in cluster.objects} == {"mine"}
    cluster.objects.clear()
    assert main(["submit", "job.yaml", "--set", "kubernetes.namespace=team-a"]) == 0
    assert {namespace for _, namespace, _ in cluster.objects} == {"team-a"}


def test_a_job_that_has_not_ended_is_left_alone(
    cluster: FakeCluster, capsys: Say
) -> None:
    assert main(["submit", "job.yaml"]) == 0
    before = json.dumps(list(cluster.objects.values()))
    assert main(["submit", "job.yaml", "--set", "kubernetes.cpu=8"]) == 4
    assert "is in default already, and has not ended" in capsys.readouterr().err
    assert json.dumps(list(cluster.objects.values())) == before


def test_a_job_that_has_ended_is_replaced_and_keeps_its_volume(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    assert main(["submit", "job.yaml"]) == 0
    cluster.finish("digits", "Failed", "PodFailurePolicy")
    kept = dict(cluster.objects)
    (tmp_path / "train.py").write_text("print('another')\n")
    assert main(["submit", "job.yaml", "--set", "metrics.listen=127.0.0.1:8000"]) == 0
    assert len(cluster.names("configmaps")) == 1  # that of before is gone
    claim = ("persistentvolumeclaims", "default", "digits")
    assert cluster.objects[claim] == kept[claim]
    policy = cluster.objects["networkpolicies", "default", "digits"]["spec"]
    assert policy["ingress"][0]["ports"][0]["port"] == 8000
    job = cluster.objects["jobs", "default", "digits"]
    assert "status" not in job


def test_what_others_have_made_is_not_replaced(
    cluster: FakeCluster, capsys: Say
) -> None:
    metadata = {"name": "digits", "uid": "u"}
    cluster.objects["jobs", "default", "digits"] = {"metadata": metadata}
    assert main(["submit", "job.yaml"]) == 4
    assert main(["cancel", "job.yaml"]) == 4
    assert "that oomrun did not make" in capsys.readouterr().err
    assert cluster.names("jobs") == ["digits"]


def test_cancel_leaves_the_volume(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml"]) == 0
    assert main(["cancel", "job.yaml"]) == 0
    assert {plural for plural, _, _ in cluster.objects} == {"persistentvolumeclaims"}
    assert main(["cancel", "job.yaml"]) == 2
    assert "there is no job digits in default" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (ended(1, message="oomrun: the script raised"), 1, "oomrun: the script raised"),
        (ended(2), 2, "the job file or the command line is wrong"),
        (ended(3), 3, "nothing fits into the memory"),
        (ended(75), 75, "another pod can go on"),
        (ended(143), 143, "signal 15"),
        (ended(137, "OOMKilled"), 137, "more than its limit; give it more"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low"}, 4, "ed): low"),
    ],
)  # fmt: skip
def test_wait_ends_as_the_job_does(
    cluster: FakeCluster, capsys: Say, status: dict[str, Any], code: int, said: str
) -> None:
    cluster.script["jobs"] = [
        lambda: None,  # submit looks whether there is one
        lambda: None,
        lambda: cluster.add_pod("digits", "digits-0-a", running()),
        lambda: (
            cluster.add_pod("digits", "digits-0-a", status),
            cluster.finish("digits", "Failed", "PodFailurePolicy"),
        ),
    ]
    assert main(["submit", "job.yaml", "--wait"]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.index("no pod yet") < error.index("digits-0-a runs")


def test_wait_and_follow(cluster: FakeCluster, capsys: Say) -> None:
    cluster.logs = {"digits-0-a": "step 1\n", "digits-0-b": "step 2\nüm\n"}
    assert main(["submit", "job.yaml"]) == 0
    cluster.script["jobs"] = [
        lambda: cluster.add_pod("digits", "digits-0-a", running()),
        lambda: cluster.add_pod("digits", "digits-0-a", ended(75)),
        lambda: cluster.add_pod("digits", "digits-0-b", {"phase": "Succeeded"}),
        lambda: cluster.finish("digits", "Complete"),
    ]
    assert main(["wait", "job.yaml", "--follow"]) == 0
    said = capsys.readouterr()
    assert said.out == "step 1\nstep 2\nüm\n"
    assert said.err.splitlines()[-1] == "oomrun: the job is complete"


def test_a_pod_without_a_log_is_waited_for(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml"]) == 0
    cluster.add_pod("digits", "digits-0-a", running())
    cluster.without_log.add("digits-0-a")
    cluster.script["jobs"] = [
        lambda: None,
        lambda: cluster.finish("digits", "Complete"),
    ]
    assert main(["wait", "job.yaml", "--follow"]) == 0
    assert "cannot read Pod digits-0-a: its node is gone" in capsys.readouterr().err


def test_wait_does_not_wait_for_what_does_not_come(
    cluster: FakeCluster, capsys: Say
) -> None:
    assert main(["wait", "job.yaml"]) == 2
    assert main(["submit", "job.yaml"]) == 0
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status = {"name": "worker", "state": state}
    stuck = {"phase": "Pending", "containerStatuses": [status]}
    cluster.add_pod("digits", "digits-0-a", stuck)
    assert main(["wait", "job.yaml"]) == 4
    assert "the image cannot be pulled: no such image" in capsys.readouterr().err


def test_wait_no_longer_than_told(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml"]) == 0
    condition = {"type": "PodScheduled", "status": "False", "message": "no GPU"}
    cluster.add_pod("digits", "a", {"phase": "Pending", "conditions": [condition]})
    assert main(["wait", "job.yaml", "--timeout", "30ms"]) == 4
    said = capsys.readouterr().err
    assert "no node takes the pod a yet: no GPU" in said
    assert "the job goes on" in said


def test_a_job_that_is_deleted_meanwhile(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml"]) == 0
    key = ("jobs", "default", "digits")
    cluster.script["jobs"] = [lambda: None, lambda: cluster.objects.pop(key)]
    assert main(["wait", "job.yaml"]) == 4
    assert "the job digits was deleted" in capsys.readouterr().err


def test_a_server_that_restarts_does_not_end_the_wait(
    cluster: FakeCluster, capsys: Say
) -> None:
    assert main(["submit", "job.yaml"]) == 0
    cluster.finish("digits", "Complete")
    cluster.broken = 3
    assert main(["wait", "job.yaml"]) == 0
    said = capsys.readouterr().err
    assert said.count("come again (503); trying again") == 1


def test_logs_and_status(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["logs", "job.yaml"]) == 2
    assert main(["status", "--kubernetes", "job.yaml"]) == 2
    assert main(["submit", "job.yaml"]) == 0
    assert main(["logs", "job.yaml"]) == 0
    assert "no pod yet" in capsys.readouterr().err
    cluster.add_pod("digits", "digits-0-a", running())
    cluster.logs["digits-0-a"] = "step 1\n"
    assert main(["logs", "job.yaml", "--follow"]) == 0
    assert capsys.readouterr().out == "step 1\n"
    assert main(["status", "--kubernetes", "job.yaml"]) == 0
    assert capsys.readouterr().out == "digits: running: the pod digits-0-a runs\n"
    assert main(["status", "--kubernetes", "job.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "digits", "namespace": "default", "state": "running",
        "message": "the pod digits-0-a runs", "exit_code": None, "pod": "digits-0-a",
    }  # fmt: skip


def test_what_the_server_refuses(cluster: FakeCluster, capsys: Say) -> None:
    cluster.forbidden = {"configmaps"}
    assert main(["submit", "job.yaml"]) == 4
    error = capsys.readouterr().err
    assert "cannot create ConfigMap digits-" in error
    assert "no rights (403)" in error
    assert "secret-token" not in error
    assert cluster.names("jobs") == []


def test_no_server(cluster: FakeCluster, capsys: Say) -> None:
    cluster.close()
    assert main(["submit", "job.yaml"]) == 4
    error = capsys.readouterr().err
    assert "the cluster cannot be reached" in error
    assert "Traceback" not in error


def test_no_way_to_a_cluster(
    cluster: FakeCluster, capsys: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", "job.yaml", "--context", "nowhere"]) == 4
    assert "there is no way to a cluster" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["submit", "job.yaml"]) == 4
    assert "there is no way to a cluster" in capsys.readouterr().err


def test_without_the_client(
    cluster: FakeCluster, capsys: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "job.yaml"]) == 4
    error = capsys.readouterr().err
    assert "neither the Python client of Kubernetes nor kubectl" in error
    assert "pip install 'oomrun[kubernetes]'" in error
    assert main(["submit", "job.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize("command", ["submit", "wait", "logs", "cancel"])
def test_a_job_file_that_is_wrong(
    cluster: FakeCluster, tmp_path: Path, capsys: Say, command: str
) -> None:
    jobs.write_job(tmp_path, "")
    assert main([command, "job.yaml"]) == 2
    assert "expected the key kubernetes" in capsys.readouterr().err
    jobs.write_job(tmp_path, "kubernetes: {image: X}")
    assert main([command, "job.yaml"]) == 2
    assert "job.yaml:3:21: kubernetes.image" in capsys.readouterr().err
    assert cluster.requests == []
