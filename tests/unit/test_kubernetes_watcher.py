"""The watcher as a pod of its own: its objects, its rights, and that it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_jobs as jobs
from fake_cluster import FakeCluster, lead_to
from oomrun.cli import main
from oomrun.kubernetes.lint import lint
from oomrun.kubernetes.submission import GpuNeed
from oomrun.kubernetes.watcher import watcher_objects
from pods import Pod

SECTION = """kubernetes:
  image: x
  namespace: default
  volume: {size: 1GiB}
  gpu_memory: any
  memory: 8GiB
  memory_max: 20GiB
"""
Say = pytest.CaptureFixture[str]
Right = tuple[str, str, str, str]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    server = FakeCluster()
    lead_to(server, tmp_path, SECTION, monkeypatch)
    yield server
    server.close()


def by_kind(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in made}


@pytest.mark.parametrize("version", jobs.VERSIONS)
def test_its_objects_are_valid_in_every_version(version: str) -> None:
    minor = int(version.split(".")[1])
    for section in (SECTION, jobs.FULL, jobs.FULL + "  mode: trainjob\n"):
        made = watcher_objects(jobs.submission(section))
        assert [each["kind"] for each in made] == [
            "ServiceAccount", "Role", "RoleBinding", "ConfigMap",
            "PersistentVolumeClaim", "NetworkPolicy", "Job",
        ]  # fmt: skip
        for manifest in made:
            jobs.check_schema(manifest, version)
        assert not any(lint(made, (1, minor)))


def test_nothing_of_it_is_the_watched_job_s() -> None:
    """Neither is ended with the other: names, labels and files are its own."""
    submission = jobs.submission(jobs.FULL)
    made = watcher_objects(submission)
    for each in made:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "digits-watch"
        assert each["metadata"]["name"].startswith("digits-watch")
        assert each["metadata"]["namespace"] == "team-a"
    pod = by_kind(made)["Job"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert not submission.selector.items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    # A small pod that any node takes, and no secret of the job in it.
    assert set(container["resources"]["limits"]) == {
        "cpu", "memory", "ephemeral-storage",
    }  # fmt: skip
    assert not {"nodeSelector", "tolerations", "affinity"} & set(pod["spec"])
    assert "envFrom" not in container
    assert [each["name"] for each in container["env"]] == ["HOME", "USER"]
    (binding,) = by_kind(made)["RoleBinding"]["subjects"]
    account = by_kind(made)["ServiceAccount"]["metadata"]
    assert (binding["name"], binding["namespace"]) == ("digits-watch", "team-a")
    assert account["name"] == pod["spec"]["serviceAccountName"] == "digits-watch"


def test_what_was_measured_here_goes_along() -> None:
    need = GpuNeed(least_bytes=3 * 2**30 + 1, whole_bytes=None)
    submission = jobs.submission(overrides=("args=[$(X)]",), need=need)
    job = by_kind(watcher_objects(submission))["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "oomrun", "submit", "--watch", "--once", "/etc/oomrun/job.yaml",
        "--set", "args=[$$(X)]", "--set", "kubernetes.gpu_memory=3073MiB",
    ]  # fmt: skip


def test_it_needs_a_namespace(
    cluster: FakeCluster, tmp_path: Path, capsys: Say
) -> None:
    jobs.write_job(tmp_path, "kubernetes: {image: x}")
    assert main(["render", "--watch", "job.yaml"]) == 2
    assert "--set kubernetes.namespace=default" in capsys.readouterr().err


def granted(role: dict[str, Any]) -> set[Right]:
    """Each right by itself: group, resource, verb and name."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def used(cluster: FakeCluster, plurals: set[str]) -> set[Right]:
    """What a user without rights would have been refused."""
    found = set()
    for method, path in cluster.requests:
        before, _, after = path.partition("/namespaces/default/")
        plural, _, name = after.partition("/")
        group = before.split("/")[2] if before.startswith("/apis/") else ""
        verb = {"POST": "create", "DELETE": "delete", "GET": "get"}[method]
        if method == "GET" and not name:
            verb = "list"
        if plural == "configmaps":
            name = ""  # of files that are not known yet
        found.add((group, plural, verb, name))
    assert {right[1] for right in found} == plurals
    return found


@pytest.mark.parametrize(
    ("more", "beside"),
    [
        ("mode: job", {"jobs"}),
        ("mode: job\n  pods: 2", {"jobs", "services"}),
        ("mode: jobset\n  pod_monitor: {a: b}", {"jobsets", "podmonitors"}),
        ("mode: mpijob", {"mpijobs"}),
        ("mode: trainjob", {"trainjobs", "trainingruntimes"}),
    ],
)
def test_its_rights_are_those_that_it_uses(
    cluster: FakeCluster, tmp_path: Path, capsys: Say, more: str, beside: set[str]
) -> None:
    """A watched job that fails once, beside files of an earlier one."""
    jobs.write_job(tmp_path, f"strategy: horovod\n{SECTION}  {more}\n".replace(
        "{size: 1GiB}", "{size: 1GiB, access: ReadWriteMany}"))  # fmt: skip
    assert main(["render", "--watch", "--json", "job.yaml"]) == 0
    role = by_kind(json.loads(capsys.readouterr().out)["items"])["Role"]
    own = {
        "app.kubernetes.io/instance": "digits",
        "app.kubernetes.io/managed-by": "oomrun",
    }
    old = {"metadata": {"name": "digits-old", "labels": own}}
    cluster.objects["configmaps", "default", "digits-old"] = old
    plural = next(name for name in beside if name.endswith(("jobs", "sets")))
    done = "Succeeded" if plural == "mpijobs" else "Complete"

    def fail() -> None:
        evicted = {"phase": "Failed", "reason": "Evicted"}
        cluster.add_pod("digits", "a", evicted, plural=plural)
        cluster.finish("digits", "Failed", plural=plural)

    cluster.lives = [fail, lambda: cluster.finish("digits", done, plural=plural)]
    assert main(["submit", "--watch", "--once", "job.yaml"]) == 0
    always = {"serviceaccounts", "configmaps", "persistentvolumeclaims",
              "networkpolicies", "pods"}  # fmt: skip
    assert used(cluster, always | beside) == granted(role)


def ended(code: int) -> dict[str, Any]:
    said = {"exitCode": code, "reason": "Error", "message": ""}
    status = {"name": "worker", "state": {"terminated": said}}
    return {"phase": "Failed", "containerStatuses": [status]}


def test_once_it_has_given_up_it_stays_so(cluster: FakeCluster, capsys: Say) -> None:
    def fail() -> None:
        cluster.add_pod("digits", "a", ended(1))
        cluster.finish("digits", "Failed", "PodFailurePolicy")

    cluster.lives = [fail]
    for _ in range(2):  # the second as another pod of the watcher's
        assert main(["submit", "--watch", "--once", "job.yaml"]) == 1
        assert "not submitted again: the job failed" in capsys.readouterr().err
    assert sum(verb == "POST" and path.endswith("/jobs")
               for verb, path in cluster.requests) == 1  # fmt: skip


def test_what_is_complete_or_gone_is_not_begun_anew(
    cluster: FakeCluster, capsys: Say
) -> None:
    cluster.lives = [lambda: cluster.finish("digits", "Complete")]
    for _ in range(2):
        assert main(["submit", "--watch", "--once", "job.yaml"]) == 0
    assert main(["cancel", "job.yaml"]) == 0
    assert main(["submit", "--watch", "--once", "job.yaml"]) == 2
    assert "there is no job digits in default" in capsys.readouterr().err
    assert cluster.names("jobs") == []


def test_its_pod_s_very_command(
    cluster: FakeCluster, tmp_path: Path, capsys: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process of its own, with the ConfigMap's files laid out."""
    assert main(["render", "--watch", "--json", "job.yaml"]) == 0
    objects = json.loads(capsys.readouterr().out)["items"]
    pod = Pod(tmp_path / "pod", objects)

    def fail() -> None:
        cluster.add_pod("digits", "a", {"phase": "Failed", "reason": "Evicted"})
        cluster.finish("digits", "Failed")

    cluster.lives = [fail, lambda: cluster.finish("digits", "Complete")]
    process = pod.start({"KUBECONFIG": str(tmp_path / "kubeconfig")})
    assert process.wait(240) == 0, pod.said()
    assert "again, as it was" in pod.said()
    kept = pod.workspace / "runs/digits.decisions.jsonl"
    kinds = [json.loads(line)["do"] for line in kept.read_text().splitlines()]
    assert kinds == ["made", "resubmit", "made"]
    # The job's own files are those that the watcher was given.
    (config,) = [n for n in cluster.names("configmaps")]
    (own,) = [each for each in objects if each["kind"] == "ConfigMap"]
    made = cluster.objects["configmaps", "default", config]
    assert made["data"] == own["data"]
