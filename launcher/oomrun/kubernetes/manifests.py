"""The objects that a job is on a cluster, as plain dictionaries.

Covers: which objects there are, and all of them but the pod (``pod``). Does not cover:
YAML (``writing``), what is wrong with them (``lint``).
"""

from __future__ import annotations

import base64
from typing import Any

from oomrun.core.errors import InfeasiblePlanError, JobFailedError, SpecError
from oomrun.core.kubernetes_spec import NewClaim
from oomrun.kubernetes import pod
from oomrun.kubernetes.quantities import binary
from oomrun.kubernetes.submission import CONTAINER, Submission
from oomrun.stops import STOPPED_EXIT_CODE

__all__ = ["Manifest", "job_manifest", "manifests"]

Manifest = dict[str, Any]

# oomrun has tried what could be tried already: another pod would end alike.
_FINAL = sorted(
    {JobFailedError.exit_code, SpecError.exit_code, InfeasiblePlanError.exit_code}
)


def manifests(submission: Submission) -> list[Manifest]:
    """All objects of the job, in the order in which they are made."""
    section = submission.section
    found = []
    if section.service_account is None:
        found.append(_service_account(submission))
    found.append(_config_map(submission))
    if isinstance(section.volume, NewClaim):
        found.append(_claim(submission, section.volume))
    found.append(_network_policy(submission))
    if section.pod_monitor is not None and submission.metrics_port is not None:
        found.append(_pod_monitor(submission, dict(section.pod_monitor)))
    return [*found, job_manifest(submission)]


def job_manifest(submission: Submission) -> Manifest:
    """The Job: one pod, tried again only where that can help."""
    section = submission.section
    made = _object("batch/v1", "Job", submission)
    if section.queue is not None:
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = section.queue
    annotations = {**dict(section.annotations), "oomrun/digest": submission.digest}
    made["metadata"]["annotations"] = annotations
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimitPerIndex": section.retries,
        "maxFailedIndexes": 0,
        # A pod that is still writing its checkpoint must be gone before the next.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "ttlSecondsAfterFinished": section.ttl_s,
        "template": pod.template(submission),
    }
    if section.deadline_s is not None:
        spec["activeDeadlineSeconds"] = section.deadline_s
    made["spec"] = spec
    return made


def _failure_rules() -> list[Manifest]:
    def on_exit(action: str, codes: list[int]) -> Manifest:
        named = {"containerName": CONTAINER, "operator": "In", "values": codes}
        return {"action": action, "onExitCodes": named}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        on_exit("Ignore", [STOPPED_EXIT_CODE]),
        on_exit("FailJob", _FINAL),
    ]


def _object(api: str, kind: str, submission: Submission, name: str = "") -> Manifest:
    metadata: Manifest = {"name": name or submission.name}
    if submission.section.namespace is not None:
        metadata["namespace"] = submission.section.namespace
    metadata["labels"] = dict(submission.labels)
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _service_account(submission: Submission) -> Manifest:
    made = _object("v1", "ServiceAccount", submission)
    return {**made, "automountServiceAccountToken": False}


def _config_map(submission: Submission) -> Manifest:
    made = _object("v1", "ConfigMap", submission, submission.config_name)
    texts, others = {}, {}
    for key, file in pod.config_keys(submission).items():
        try:
            texts[key] = file.content.decode()
        except UnicodeDecodeError:
            others[key] = base64.b64encode(file.content).decode()
    made |= {"immutable": True, "data": texts}
    return {**made, "binaryData": others} if others else made


def _claim(submission: Submission, claim: NewClaim) -> Manifest:
    spec: Manifest = {
        "accessModes": [claim.access],
        "resources": {"requests": {"storage": binary(claim.size_bytes)}},
    }
    if claim.storage_class is not None:
        spec["storageClassName"] = claim.storage_class
    return {**_object("v1", "PersistentVolumeClaim", submission), "spec": spec}


def _network_policy(submission: Submission) -> Manifest:
    """Nothing comes in but the scrapes."""
    port = submission.metrics_port
    allowed = [] if port is None else [{"ports": [{"port": port, "protocol": "TCP"}]}]
    spec = {
        "podSelector": {"matchLabels": submission.selector},
        "policyTypes": ["Ingress"],
        "ingress": allowed,
    }
    made = _object("networking.k8s.io/v1", "NetworkPolicy", submission)
    return {**made, "spec": spec}


def _pod_monitor(submission: Submission, labels: dict[str, str]) -> Manifest:
    made = _object("monitoring.coreos.com/v1", "PodMonitor", submission)
    made["metadata"]["labels"] = {**labels, **made["metadata"]["labels"]}
    made["spec"] = {
        "selector": {"matchLabels": submission.selector},
        "podMetricsEndpoints": [{"port": pod.METRICS, "interval": "15s"}],
    }
    return made
