"""What an operator's kind may say: each of ours is right, and bad examples are not.

JobSet, TrainJob and its runtime by the models of Kubeflow's own package; the MPIJob by
a schema of the tests' (``tests/data``); the Jobs and pods in them by Kubernetes's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator

import kubernetes_jobs as jobs
from oomrun.kubernetes.manifests import manifests

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]
SECTION = """strategy: horovod
kubernetes:
  image: x
  pods: 3
  gpus: 2
  deadline: 3d
  volume: {size: 1GiB, access: ReadWriteMany}
"""
KINDS = {
    "JobSet": "jobset", "MPIJob": "mpijob", "TrainJob": "trainjob",
    "TrainingRuntime": "trainjob",
}  # fmt: skip


def made(kind: str) -> Manifest:
    submission = jobs.submission(f"{SECTION}  mode: {KINDS[kind]}\n")
    (found,) = [each for each in manifests(submission) if each["kind"] == kind]
    return copy.deepcopy(found)


def replica(job: Manifest, name: str = "Launcher") -> Manifest:
    found: Manifest = job["spec"]["mpiReplicaSpecs"][name]
    return found


def inner_job(owner: Manifest) -> Manifest:
    spec = owner["spec"]
    spec = spec if owner["kind"] == "JobSet" else spec["template"]["spec"]
    found: Manifest = spec["replicatedJobs"][0]["template"]["spec"]
    return found


def container(template: Manifest) -> Manifest:
    found: Manifest = template["spec"]["containers"][0]
    return found


BAD: list[tuple[str, str, Change]] = [
    ("MPIJob", "group", lambda j: j.update(apiVersion="kubeflow.org/v1")),
    ("MPIJob", "key of the spec", lambda j: j["spec"].update(slotPerWorker=1)),
    ("MPIJob", "no replicas", lambda j: j["spec"].pop("mpiReplicaSpecs")),
    ("MPIJob", "no launcher", lambda j: j["spec"]["mpiReplicaSpecs"].pop("Launcher")),
    ("MPIJob", "another replica",
     lambda j: j["spec"]["mpiReplicaSpecs"].update(Chief=replica(j))),
    ("MPIJob", "two launchers", lambda j: replica(j).update(replicas=2)),
    ("MPIJob", "no worker", lambda j: replica(j, "Worker").update(replicas=0)),
    ("MPIJob", "number as text", lambda j: j["spec"].update(slotsPerWorker="2")),
    ("MPIJob", "below zero", lambda j: j["spec"]["runPolicy"].update(backoffLimit=-1)),
    ("MPIJob", "restart policy", lambda j: replica(j).update(restartPolicy="Always")),
    ("MPIJob", "clean pods",
     lambda j: j["spec"]["runPolicy"].update(cleanPodPolicy="running")),
    ("MPIJob", "key of the policy", lambda j: j["spec"]["runPolicy"].update(backoff=1)),
    ("MPIJob", "implementation", lambda j: j["spec"].update(mpiImplementation="MPI")),
    ("MPIJob", "folder of the keys", lambda j: j["spec"].update(sshAuthMountPath="")),
    ("MPIJob", "key of a replica", lambda j: replica(j).update(count=1)),
    ("MPIJob", "key of a pod", lambda j: replica(j)["template"]["spec"].update(gpus=1)),
    ("MPIJob", "key of a container",
     lambda j: container(replica(j, "Worker")["template"]).update(cmd=[])),
    ("JobSet", "key of the spec", lambda j: j["spec"].update(maxRestarts=1)),
    ("JobSet", "key of the policy",
     lambda j: j["spec"]["failurePolicy"].update(retries=1)),
    ("JobSet", "key of the Job", lambda j: inner_job(j).update(retries=1)),
    ("JobSet", "number as text", lambda j: inner_job(j).update(backoffLimit="0")),
    ("JobSet", "key of a container",
     lambda j: container(inner_job(j)["template"]).update(cmd=[])),
    ("TrainJob", "key of the spec", lambda j: j["spec"].update(nodes=1)),
    ("TrainJob", "key of the trainer", lambda j: j["spec"]["trainer"].update(nodes=1)),
    ("TrainingRuntime", "key of the policy",
     lambda j: j["spec"]["mlPolicy"].update(nodes=1)),
    ("TrainingRuntime", "key of the Job", lambda j: inner_job(j).update(retries=1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_rendered_is_right(kind: str) -> None:
    for version in (jobs.VERSIONS[0], jobs.VERSIONS[-1]):
        jobs.check_whole(made(kind), version)


@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind, _, change in BAD],
    ids=[f"{kind}: {name}" for kind, name, _ in BAD],
)
def test_a_bad_example(kind: str, change: Change) -> None:
    manifest = made(kind)
    change(manifest)
    with pytest.raises(
        (AssertionError, ValueError, kubernetes_validate.ValidationError)
    ):
        jobs.check_whole(manifest, "1.34")


def test_there_is_a_bad_example_of_each_kind() -> None:
    assert {kind for kind, _, _ in BAD} == set(KINDS)
    Draft202012Validator.check_schema(jobs.mpi_job_schema())
