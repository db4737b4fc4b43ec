"""The objects that a job is on a cluster, as plain dictionaries.

Covers: which objects there are, and all of them but the pod (``pod``). Does not cover:
YAML (``writing``), what is wrong with them (``lint``).
"""

from __future__ import annotations

import base64

from oomrun.core.kubernetes_spec import NewClaim
from oomrun.kubernetes import pod
from oomrun.kubernetes.modes import main_objects
from oomrun.kubernetes.objects import Manifest, made
from oomrun.kubernetes.quantities import binary
from oomrun.kubernetes.submission import MEETING_PORT, Submission

__all__ = ["Manifest", "manifests"]


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
    if section.mode == "job" and section.pods > 1:
        found.append(_service(submission))
    return [*found, *main_objects(submission)]


def _service_account(submission: Submission) -> Manifest:
    whole = made("v1", "ServiceAccount", submission)
    return {**whole, "automountServiceAccountToken": False}


def _config_map(submission: Submission) -> Manifest:
    whole = made("v1", "ConfigMap", submission, submission.config_name)
    texts, others = {}, {}
    for key, file in pod.config_keys(submission).items():
        try:
            texts[key] = file.content.decode()
        except UnicodeDecodeError:
            others[key] = base64.b64encode(file.content).decode()
    whole |= {"immutable": True, "data": texts}
    return {**whole, "binaryData": others} if others else whole


def _claim(submission: Submission, claim: NewClaim) -> Manifest:
    spec: Manifest = {
        "accessModes": [claim.access],
        "resources": {"requests": {"storage": binary(claim.size_bytes)}},
    }
    if claim.storage_class is not None:
        spec["storageClassName"] = claim.storage_class
    return {**made("v1", "PersistentVolumeClaim", submission), "spec": spec}


def _network_policy(submission: Submission) -> Manifest:
    """Nothing comes in but the scrapes, and the job's own pods."""
    port = submission.metrics_port
    allowed: list[Manifest] = []
    if port is not None:
        allowed.append({"ports": [{"port": port, "protocol": "TCP"}]})
    if submission.section.pods > 1:
        # Workers take whatever ports are free.
        own = {"podSelector": {"matchLabels": submission.selector}}
        allowed.append({"from": [own]})
    spec = {
        "podSelector": {"matchLabels": submission.selector},
        "policyTypes": ["Ingress"],
        "ingress": allowed,
    }
    whole = made("networking.k8s.io/v1", "NetworkPolicy", submission)
    return {**whole, "spec": spec}


def _service(submission: Submission) -> Manifest:
    """No address of its own: a name for each pod, from before it is ready."""
    port = {"name": "meeting", "port": MEETING_PORT, "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": submission.selector,
        "ports": [port],
    }
    return {**made("v1", "Service", submission), "spec": spec}


def _pod_monitor(submission: Submission, labels: dict[str, str]) -> Manifest:
    whole = made("monitoring.coreos.com/v1", "PodMonitor", submission)
    whole["metadata"]["labels"] = {**labels, **whole["metadata"]["labels"]}
    endpoint = {"port": pod.METRICS, "interval": "15s"}
    if submission.spec.metrics.tls:
        endpoint["scheme"] = "https"
    selected = {**submission.selector, **submission.first_pod}
    whole["spec"] = {
        "selector": {"matchLabels": selected},
        "podMetricsEndpoints": [endpoint],
    }
    return whole
