"""How a job on a cluster stands: the ends of pods, as the API server tells them."""

from __future__ import annotations

from typing import Any

import pytest

from oomrun.kubernetes.endings import standing

Manifest = dict[str, Any]


def job(condition: str = "", reason: str = "", **more: Any) -> Manifest:
    made = {"type": condition, "status": "True", "reason": reason, "message": "m\nn"}
    return {
        "metadata": {"name": "digits", **more.pop("metadata", {})},
        "spec": more,
        "status": {"conditions": [made] if condition else []},
    }


def pod(phase: str, number: int = 1, **status: Any) -> Manifest:
    limits = {"resources": {"limits": {"memory": "16Gi"}}}
    return {
        "metadata": {
            "name": f"digits-0-{number}",
            "creationTimestamp": f"2026-0{number}",
        },
        "spec": {"containers": [{"name": "worker", **limits}]},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> list[Manifest]:
    other = {"name": "sidecar", "state": {"terminated": {"exitCode": 99}}}
    return [other, {"name": "worker", "state": state}]


def ended(code: int, reason: str = "Error", message: str = "") -> Manifest:
    said = {"exitCode": code, "reason": reason, "message": message}
    return pod("Failed", containerStatuses=container(terminated=said))


EVICTED = pod("Failed", reason="Evicted", message="The node was low on memory.")
FAILED = ("Failed", "PodFailurePolicy")


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (ended(1), 1, "the training failed (exit code 1)"),
        (ended(1, message="a\noomrun: why\n\n"), 1, "(exit code 1): oomrun: why"),
        (ended(2), 2, "the job file or the command line is wrong"),
        (ended(3), 3, "nothing fits into the memory"),
        (ended(4), 4, "the machine or oomrun itself failed"),
        (ended(75), 75, "was stopped, and another pod can go on"),
        (ended(143), 143, "was killed by signal 15 (exit code 143)"),
        (ended(137), 137, "was killed (SIGKILL) (exit code 137)"),
        (ended(42), 42, "ended (exit code 42)"),
        (ended(137, "OOMKilled"), 137, "for host memory (exit code 137): it took more "
         "than its limit of 16Gi; give it more kubernetes.memory"),
        (EVICTED, 4, "was ended by its node (Evicted): The node was low on memory."),
        (pod("Failed", reason="Evicted", message="x",
             containerStatuses=container(terminated={"exitCode": 137})), 137,
         "(Evicted)"),
        (pod("Failed"), 4, "was ended by its node (?): it does not say why"),
    ],
)  # fmt: skip
def test_a_job_that_failed(last: Manifest, code: int, said: str) -> None:
    found = standing(job(*FAILED), [last])
    assert (found.state, found.exit_code) == ("failed", code)
    assert said in found.message
    assert found.message.isprintable()


def test_a_job_whose_pods_are_gone() -> None:
    found = standing(job("Failed", "MaxFailedIndexesExceeded"), [])
    assert found.exit_code == 4
    assert found.message == "the job failed: m n; its pods are gone"


def test_the_last_pod_that_failed_says_why() -> None:
    first, last = ended(4), ended(1)
    first["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    last["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    assert standing(job(*FAILED), [last, first]).exit_code == 1


def test_a_deadline_can_be_gone_on_from() -> None:
    found = standing(job("Failed", "DeadlineExceeded"), [])
    assert found.exit_code == 75
    assert "kubernetes.deadline" in found.message


def test_a_job_that_completed() -> None:
    found = standing(job("Complete"), [pod("Succeeded")])
    assert (found.state, found.exit_code, found.pod) == ("completed", 0, "digits-0-1")


def test_a_condition_that_is_not_so_yet_is_none() -> None:
    made = job("Complete")
    made["status"]["conditions"][0]["status"] = "False"
    assert standing(made, []).exit_code is None


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ImagePullBackOff", "the image cannot be pulled: no such host"),
        ("InvalidImageName", "no valid name"),
        ("ErrImageNeverPull", "not on the node"),
        ("CreateContainerConfigError", "cannot be made"),
    ],
)
def test_a_pod_that_cannot_start_by_itself(reason: str, said: str) -> None:
    waiting = {"reason": reason, "message": "no such host"}
    stuck = pod("Pending", containerStatuses=container(waiting=waiting))
    found = standing(job(), [stuck])
    assert (found.state, found.exit_code, found.pod) == ("stuck", 4, None)
    assert said in found.message


def test_a_pod_that_no_node_takes_may_be_taken_later() -> None:
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }  # fmt: skip
    found = standing(job(), [pod("Pending", conditions=[condition])])
    assert (found.state, found.exit_code) == ("waiting", None)
    assert "no node takes the pod digits-0-1 yet: 0/3 nodes" in found.message


def test_before_there_is_a_pod() -> None:
    assert standing(job(), []).message == "no pod yet"
    held = job(suspend=True)
    assert standing(held, []).message == "no pod yet: the Job is suspended"
    held["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "training"}
    assert standing(held, []).message.endswith("it waits in the queue training")


def test_a_pod_that_runs_says_what_was_before_it() -> None:
    running = pod("Running", 2)
    assert standing(job(), [running]).message == "the pod digits-0-2 runs"
    found = standing(job(), [running, EVICTED])
    assert (found.state, found.pod) == ("running", "digits-0-2")
    assert "the one before it was ended by its node (Evicted)" in found.message


def test_between_two_pods() -> None:
    found = standing(job(), [ended(75)])
    assert (found.state, found.exit_code) == ("waiting", None)
    assert "was stopped, and another pod can go on" in found.message


def test_a_pod_that_is_being_made() -> None:
    waiting = {"reason": "ContainerCreating"}
    made = pod("Pending", containerStatuses=container(waiting=waiting))
    assert standing(job(), [made]).message == "the pod digits-0-1 is being made"
    waiting = {"reason": "ErrImagePull", "message": "EOF"}
    made = pod("Pending", containerStatuses=container(waiting=waiting))
    found = standing(job(), [made])
    assert (found.message, found.exit_code) == (
        "the pod digits-0-1 is being made: EOF", None,
    )  # fmt: skip


@pytest.mark.parametrize("odd", [None, [], "x", 1, {}, [None], [[]], {"a": 1}])
def test_whatever_is_said_nothing_is_raised(odd: Any) -> None:
    for made in ({}, {"status": odd}, {"status": {"conditions": odd}, "spec": odd}):
        for one in (
            {}, {"status": odd, "metadata": odd},
            {"status": {"phase": "Failed", "containerStatuses": odd}, "spec": odd},
            {"status": {"phase": "Pending", "conditions": odd}},
        ):  # fmt: skip
            assert standing(made, [one]).message
