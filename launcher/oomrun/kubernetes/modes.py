"""The one object that starts a job's pods: a Job, or what an operator has instead.

Covers: Job, JobSet, MPIJob, TrainJob with its runtime, each for one pod or several,
and where several find each other. Does not cover: the pod (``pod``), the objects
beside (``manifests``).

In each mode the pods are alike and do the same: pod 0 has the run, the others are its
members (``oomrun.gang``). Nobody needs mpirun, ssh or an operator's variables, so what
differs is who counts retries, and what the pods are called.
"""

from __future__ import annotations

from typing import Any

from oomrun.core.errors import InfeasiblePlanError, JobFailedError, SpecError
from oomrun.kubernetes import pod
from oomrun.kubernetes.objects import Manifest, made
from oomrun.kubernetes.submission import Submission
from oomrun.stops import STOPPED_EXIT_CODE

__all__ = ["main_objects"]

_TRAINER = "trainer.kubeflow.org"
_QUEUE = "kueue.x-k8s.io/queue-name"
# oomrun has tried what could be tried already: another pod would end alike.
_FINAL = sorted(
    {JobFailedError.exit_code, SpecError.exit_code, InfeasiblePlanError.exit_code}
)


def main_objects(submission: Submission) -> list[Manifest]:
    """What starts the pods, last, and what that needs of its own."""
    match submission.section.mode:
        case "job":
            return [_annotated("batch/v1", "Job", submission, _job(submission))]
        case "jobset":
            spec = _job_set(submission, "worker", [])
            spec["ttlSecondsAfterFinished"] = submission.section.ttl_s
            return [_annotated("jobset.x-k8s.io/v1alpha2", "JobSet", submission, spec)]
        case "mpijob":
            spec = _mpi_job(submission)
            return [_annotated("kubeflow.org/v2beta1", "MPIJob", submission, spec)]
        case "trainjob":
            return _train_job(submission)


def _annotated(
    api: str, kind: str, submission: Submission, spec: dict[str, Any]
) -> Manifest:
    section = submission.section
    found = made(api, kind, submission)
    if section.queue is not None:
        found["metadata"]["labels"][_QUEUE] = section.queue
    annotations = {**dict(section.annotations), "oomrun/digest": submission.digest}
    found["metadata"]["annotations"] = annotations
    return {**found, "spec": spec}


def _job(submission: Submission) -> dict[str, Any]:
    """Pods that are tried again only where that can help."""
    section = submission.section
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": section.pods,
        "parallelism": section.pods,
        "backoffLimitPerIndex": section.retries,
        "maxFailedIndexes": 0,
        # A pod that is still writing its checkpoint must be gone before the next.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules(submission.container)},
        "ttlSecondsAfterFinished": section.ttl_s,
        "template": pod.template(submission),
    }
    if section.deadline_s is not None:
        spec["activeDeadlineSeconds"] = section.deadline_s
    return spec


def _failure_rules(container: str) -> list[dict[str, Any]]:
    def on_exit(action: str, codes: list[int]) -> dict[str, Any]:
        named = {"containerName": container, "operator": "In", "values": codes}
        return {"action": action, "onExitCodes": named}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        on_exit("Ignore", [STOPPED_EXIT_CODE]),
        on_exit("FailJob", _FINAL),
    ]


def _job_set(submission: Submission, name: str, labels: list[str]) -> dict[str, Any]:
    """A JobSet's ``spec`` with all pods in one Job, which it starts again as a whole.

    Args:
        submission: the job.
        name: of that Job, and part of its pods' names.
        labels: keys and values for it, in turn.
    """
    section = submission.section
    job = _job(submission)
    # A pod that counts as failed ends its Job, and the JobSet starts all of it again.
    for key in ("backoffLimitPerIndex", "maxFailedIndexes", "ttlSecondsAfterFinished"):
        del job[key]
    job["backoffLimit"] = 0
    template: dict[str, Any] = {"spec": job}
    if labels:
        template["metadata"] = {
            "labels": dict(zip(labels[::2], labels[1::2], strict=True))
        }
    final = {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": submission.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": section.retries, "rules": [final]},
        "replicatedJobs": [{"name": name, "replicas": 1, "template": template}],
    }


def _mpi_job(submission: Submission) -> dict[str, Any]:
    """The launcher is pod 0 and has GPUs, too; the workers are the other pods."""
    section = submission.section
    replicas: dict[str, Any] = {
        "Launcher": {
            "replicas": 1,
            "restartPolicy": "Never",
            "template": _without_policy(pod.template(submission, member="0")),
        }
    }
    if section.pods > 1:
        label = "metadata.labels['training.kubeflow.org/replica-index']"
        template = pod.template(submission, member="1+", index_of=label)
        replicas["Worker"] = {
            "replicas": section.pods - 1,
            # They begin anew in their place, and wait for the launcher.
            "restartPolicy": "OnFailure",
            "template": _without_policy(template),
        }
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",
        "backoffLimit": section.retries,
        "ttlSecondsAfterFinished": section.ttl_s,
    }
    if section.deadline_s is not None:
        policy["activeDeadlineSeconds"] = section.deadline_s
    return {
        "slotsPerWorker": max(1, section.gpus),
        "runLauncherAsWorker": True,
        # Its key is not used; the default is a folder of root's.
        "sshAuthMountPath": "/etc/oomrun-ssh",
        "runPolicy": policy,
        "mpiReplicaSpecs": replicas,
    }


def _without_policy(template: dict[str, Any]) -> dict[str, Any]:
    """The template without what the operator sets, and warns of otherwise."""
    spec = {key: value for key, value in template["spec"].items()}
    del spec["restartPolicy"]
    return {**template, "spec": spec}


def _train_job(submission: Submission) -> list[Manifest]:
    """A runtime that is the pods, and a TrainJob that starts it."""
    step = [f"{_TRAINER}/trainjob-ancestor-step", "trainer"]
    runtime = made(f"{_TRAINER}/v1alpha1", "TrainingRuntime", submission)
    pods = submission.section.pods
    runtime["spec"] = {
        "mlPolicy": {"numNodes": pods},
        "template": {"spec": _job_set(submission, "node", step)},
    }
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": _TRAINER,
            "kind": "TrainingRuntime",
            "name": submission.name,
        },
        "trainer": {"numNodes": pods},
    }
    if submission.section.deadline_s is not None:
        spec["activeDeadlineSeconds"] = submission.section.deadline_s
    job = _annotated(f"{_TRAINER}/v1alpha1", "TrainJob", submission, spec)
    return [runtime, job]
