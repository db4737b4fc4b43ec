"""``oomrun submit --watch`` against a server that plays how pods end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_jobs as jobs
from fake_cluster import FakeCluster, lead_to
from oomrun.cli import main
from oomrun.core import last_words
from oomrun.core.state import JobState

SECTION = """kubernetes:
  image: x
  volume: {size: 1GiB}
  gpu_memory: any
  memory: 8GiB
  memory_max: 20GiB
"""
DECISIONS = Path("runs/digits.decisions.jsonl")
Say = pytest.CaptureFixture[str]
Life = Callable[[], object]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    server = FakeCluster()
    lead_to(server, tmp_path, SECTION, monkeypatch)
    yield server
    server.close()


class Lives:
    """What becomes of each job, and what each of them asked for."""

    def __init__(self, cluster: FakeCluster, *statuses: dict[str, Any] | None) -> None:
        self.asked: list[str] = []
        self.commands: list[list[str]] = []
        self._cluster = cluster
        cluster.lives = [self._life(status) for status in statuses]

    def _life(self, status: dict[str, Any] | None) -> Life:
        def live() -> None:
            job = self._cluster.objects["jobs", "default", "digits"]
            (container,) = job["spec"]["template"]["spec"]["containers"]
            self.asked.append(container["resources"]["limits"]["memory"])
            self.commands.append(container["command"])
            if status is None:
                self._cluster.finish("digits", "Complete")
            else:
                self._cluster.add_pod("digits", f"digits-{len(self.asked)}", status)
                self._cluster.finish("digits", "Failed", "PodFailurePolicy")

        return live


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    said = {"exitCode": code, "reason": reason, "message": message}
    status = {"name": "worker", "state": {"terminated": said}}
    return {"phase": "Failed", "containerStatuses": [status]}


OOM_KILLED = ended(137, "OOMKilled")
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}


def decisions() -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in DECISIONS.read_text().splitlines()]
    return [line for line in lines if line["do"] != "made"]


def watch(*more: str) -> int:
    return main(["submit", "job.yaml", "--watch", *more])


def test_host_memory_is_raised_up_to_what_the_job_file_allows(
    cluster: FakeCluster, capsys: Say
) -> None:
    lives = Lives(cluster, OOM_KILLED, OOM_KILLED, OOM_KILLED, OOM_KILLED)
    assert watch() == 137
    assert lives.asked == ["8Gi", "12Gi", "18Gi", "20Gi"]
    said = capsys.readouterr().err
    assert "kubernetes.memory 8GiB -> 12GiB" in said
    assert "it had all that kubernetes.memory_max allows (20GiB)" in said
    assert [line["do"] for line in decisions()] == ["resubmit"] * 3 + ["give_up"]
    assert len({line["uid"] for line in decisions()}) == 4


def test_a_lever_for_host_memory_where_the_job_file_lists_it(
    cluster: FakeCluster, tmp_path: Path, capsys: Say
) -> None:
    listed = "recovery: {levers: [micro_batch, host_pipeline], pulled: [recompute]}\n"
    jobs.write_job(tmp_path, listed + SECTION.replace("20GiB", "12GiB"))
    lives = Lives(cluster, OOM_KILLED, OOM_KILLED, OOM_KILLED)
    assert watch() == 137
    assert lives.asked == ["8Gi", "12Gi", "12Gi"]
    pulled = "recovery.pulled=[recompute, host_pipeline]"
    assert [pulled in words for words in lives.commands] == [False, False, True]
    said = capsys.readouterr().err
    assert "lever host_pipeline (tf.data and PyDatasets hold one batch ahead" in said
    assert "it had all that kubernetes.memory_max allows (12GiB)" in said


def test_an_eviction_changes_nothing(cluster: FakeCluster) -> None:
    lives = Lives(cluster, EVICTED, ended(75), ended(143), None)
    assert watch() == 0
    assert lives.asked == ["8Gi"] * 4
    assert [line["failure"] for line in decisions()] == ["evicted", "stopped", "killed"]
    assert all(not line["overrides"] for line in decisions())


def test_a_smaller_micro_batch_where_the_pod_had_no_restart_left(
    cluster: FakeCluster,
) -> None:
    state = JobState(state="failed", last_cause="device_oom", micro_batch_failed=9)
    said = last_words.of_state(state, 1, "no restart is left")
    lives = Lives(cluster, ended(1, message=said), OOM_KILLED, None)
    assert watch() == 0
    changes = [
        [word for word in words if word.startswith(("batch.", "kubernetes."))]
        for words in lives.commands
    ]
    # What was changed once stays so.
    assert changes == [
        [],
        ["batch.micro={max: 4}"],
        ["batch.micro={max: 4}", "kubernetes.memory=12288MiB"],
    ]


@pytest.mark.parametrize("code", [1, 2, 3])
def test_what_another_pod_cannot_mend_is_left(
    cluster: FakeCluster, capsys: Say, code: int
) -> None:
    lives = Lives(cluster, ended(code))
    assert watch() == code
    assert len(lives.asked) == 1
    assert "not submitted again: the job failed" in capsys.readouterr().err
    assert cluster.names("jobs") == ["digits"]  # to be looked at


def test_what_cannot_start_is_left(cluster: FakeCluster, capsys: Say) -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status = {"name": "worker", "state": state}
    stuck = {"phase": "Pending", "containerStatuses": [status]}
    cluster.lives = [lambda: cluster.add_pod("digits", "a", stuck)]
    assert watch() == 4
    assert "the image cannot be pulled" in capsys.readouterr().err
    condition = {"type": "PodScheduled", "status": "False", "message": "no GPU"}
    pending = {"phase": "Pending", "conditions": [condition]}
    cluster.add_pod("digits", "a", pending)
    assert watch("--timeout", "30ms") == 4
    assert "no node takes the pod a yet: no GPU" in capsys.readouterr().err
    assert decisions() == []


def test_it_is_bounded(cluster: FakeCluster, capsys: Say) -> None:
    lives = Lives(cluster, *[EVICTED] * 5)
    assert watch("--resubmits", "2") == 4
    assert len(lives.asked) == 3
    assert "submitted again 2 times (--resubmits)" in capsys.readouterr().err


def test_a_watcher_that_was_killed_decides_nothing_twice(cluster: FakeCluster) -> None:
    """It is killed after a decision, then after the failed job was deleted."""
    lives = Lives(cluster, OOM_KILLED, None)
    assert watch("--resubmits", "0") == 137
    # As if it had been allowed, and killed before it did anything of it.
    lines = [json.loads(line) for line in DECISIONS.read_text().splitlines()]
    lines[-1] |= {"do": "resubmit", "overrides": ["kubernetes.memory=12288MiB"]}
    kept = "".join(json.dumps(line) + "\n" for line in lines)
    DECISIONS.write_text(kept + '{"torn')
    key = ("jobs", "default", "digits")
    for gone in (False, True):
        DECISIONS.write_text(kept)
        if gone:
            del cluster.objects[key]
            lives = Lives(cluster, None)
        assert watch() == 0
        assert lives.asked[-1] == "12Gi"
        assert [line["do"] for line in decisions()] == ["resubmit"]
        if not gone:
            # The failed one is there again, as it was.
            cluster.objects[key]["status"] = {}
            cluster.finish("digits", "Failed", "PodFailurePolicy")
            cluster.objects[key]["metadata"]["uid"] = lines[-1]["uid"]


def test_a_job_that_is_there_is_watched(cluster: FakeCluster, capsys: Say) -> None:
    assert main(["submit", "job.yaml"]) == 0
    key = ("jobs", "default", "digits")
    uid = cluster.objects[key]["metadata"]["uid"]
    lives = Lives(cluster, None)
    cluster.script["jobs"] = [
        lambda: None,
        lambda: (
            cluster.add_pod("digits", "a", OOM_KILLED),
            cluster.finish("digits", "Failed", "PodFailurePolicy"),
        ),
    ]
    assert watch() == 0
    assert "the job digits is there; watching it" in capsys.readouterr().err
    assert lives.asked == ["12Gi"]
    assert [line["uid"] for line in decisions()] == [uid]


def test_one_that_was_given_up_begins_anew(cluster: FakeCluster) -> None:
    Lives(cluster, OOM_KILLED, ended(1))
    assert watch() == 1
    lives = Lives(cluster, None)
    assert watch() == 0
    assert lives.asked == ["8Gi"]
    assert decisions() == []


@pytest.mark.parametrize(
    ("mode", "plural", "condition"),
    [
        ("jobset", "jobsets", "Completed"),
        ("mpijob", "mpijobs", "Succeeded"),
        ("trainjob", "trainjobs", "Complete"),
    ],
)
def test_the_same_in_each_mode(
    cluster: FakeCluster, capsys: Say, mode: str, plural: str, condition: str
) -> None:
    def fail() -> None:
        status = dict(OOM_KILLED, containerStatuses=[
            {**OOM_KILLED["containerStatuses"][0], "name": "node"}
        ]) if mode == "trainjob" else OOM_KILLED  # fmt: skip
        cluster.add_pod("digits", "a", status, plural=plural)
        cluster.finish("digits", "Failed", plural=plural)

    cluster.lives = [fail, lambda: cluster.finish("digits", condition, plural=plural)]
    assert watch("--mode", mode) == 0
    assert [line["failure"] for line in decisions()] == ["host_oom"]
    assert cluster.names(plural) == ["digits"]
    assert cluster.names("jobs") == []
    assert main(["status", "--kubernetes", "job.yaml", "--mode", mode]) == 0
    assert "digits: completed" in capsys.readouterr().out
    assert main(["cancel", "job.yaml", "--mode", mode]) == 0
    assert {plural for plural, _, _ in cluster.objects} <= {
        "persistentvolumeclaims", "pods",
    }  # fmt: skip
