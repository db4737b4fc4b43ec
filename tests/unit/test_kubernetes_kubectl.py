"""The real kubectl with what ``render`` prints, against the server of the tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubernetes_jobs as jobs
from fake_cluster import FakeCluster
from oomrun.cli import main
from programs import KUBECTL, kubectl, needs_kubectl

pytestmark = needs_kubectl

SECTION = """strategy: horovod
kubernetes:
  image: x
  pods: 2
  gpu_memory: any
  pod_monitor: {release: p}
  volume: {size: 1GiB, access: ReadWriteMany}
  annotations: {a: "1e3", b: "$(touch /tmp/x) `id`", c: "x: #\\n- {"}
  labels: {n: "0o7", y: "y"}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.chdir(tmp_path)
    jobs.write_job(tmp_path, SECTION)
    server = FakeCluster()
    monkeypatch.setenv("KUBECONFIG", str(server.write_config(tmp_path / "kubeconfig")))
    monkeypatch.setenv("HOME", str(tmp_path))  # it keeps what it has discovered there
    yield server
    server.close()


def test_kubectl_makes_waits_reads_and_deletes(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", "job.yaml"]) == 0
    text = capsys.readouterr().out
    assert main(["render", "job.yaml", "--json"]) == 0
    rendered = json.loads(capsys.readouterr().out)["items"]
    said = kubectl("create", "-f", "-", given=text)
    assert said.count(" created") == len(rendered) == 7
    for wanted in rendered:
        (kept,) = [o for o in cluster.objects.values() if o["kind"] == wanted["kind"]]
        metadata = {**wanted["metadata"], "namespace": "default"}
        own = {key: kept["metadata"][key] for key in metadata}
        assert own == metadata
        assert kept.get("spec") == wanted.get("spec")
    cluster.add_pod("digits", "digits-0-a", {"phase": "Running"})
    cluster.logs["digits-0-a"] = "step 1\n"
    assert kubectl("logs", "digits-0-a") == "step 1\n"
    found = json.loads(kubectl("get", "jobs", "-o", "json"))
    assert [each["metadata"]["name"] for each in found["items"]] == ["digits"]
    own = "--selector=app.kubernetes.io/instance=digits"
    kinds = ",".join(sorted(plural for plural, _, _ in cluster.objects))
    listed = kubectl("get", kinds, own, "-o", "name").splitlines()
    assert len(listed) == len(rendered) + 1  # the pod
    seen = kubectl("get", "jobs", own, "--watch-only", "-o", "name")
    assert seen == "job.batch/digits\n"
    cluster.finish("digits", "Complete")
    words = ("wait", "--for=condition=Complete", "--timeout=60s", "job/digits")
    assert "condition met" in kubectl(*words)
    kubectl("delete", "--wait=false", "-f", "-", given=text)
    assert {plural for plural, _, _ in cluster.objects} == {"pods"}


def test_kubectl_asks_the_server_to_check_the_fields(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a misspelt one is refused, and nothing half-made is left of it."""
    assert main(["render", "job.yaml"]) == 0
    text = capsys.readouterr().out.replace("completionMode:", "completionMod:")
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "apply", "-f", "-"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "completionMod" in done.stderr
    assert "jobs" not in {plural for plural, _, _ in cluster.objects}
