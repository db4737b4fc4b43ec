"""A pod that submits a job and watches it: ``oomrun submit --watch`` on the cluster.

Covers: its objects, and the rights that it needs there and no more. Does not cover: the
job's own objects, which the watcher makes (``manifests``), what it decides
(``resubmission``).

It is a Job: a Deployment would start it again when the watched job has ended. What it
decided is on a volume of its own, so that another pod goes on where this one was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oomrun.core.errors import PlatformError
from oomrun.core.kubernetes_spec import JOB_FILE, JOB_FOLDER, NewClaim
from oomrun.kubernetes import pod
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.objects import Manifest, made
from oomrun.kubernetes.submission import Submission

__all__ = ["watcher_objects"]

_GIB = 2**30
_MIB = 2**20
_RETRIES = 6
# Its own ends: trouble with the cluster, SIGKILL, SIGTERM. What else it ends with is
# the watched job's exit code, and final.
_OWN_CODES = [PlatformError.exit_code, 128 + 9, 128 + 15]
_ROLES = "rbac.authorization.k8s.io"
#: API group and plural of what a job is made of.
_RESOURCES = {
    "ConfigMap": ("", "configmaps"),
    "Job": ("batch", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "jobsets"),
    "MPIJob": ("kubeflow.org", "mpijobs"),
    "NetworkPolicy": ("networking.k8s.io", "networkpolicies"),
    "PersistentVolumeClaim": ("", "persistentvolumeclaims"),
    "PodMonitor": ("monitoring.coreos.com", "podmonitors"),
    "Service": ("", "services"),
    "ServiceAccount": ("", "serviceaccounts"),
    "TrainJob": ("trainer.kubeflow.org", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "trainingruntimes"),
}
# What is only made, and left as it is where it is there already.
_KEPT = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount")


def watcher_objects(submission: Submission) -> list[Manifest]:
    """The objects of the watcher of a job, in the order in which they are made.

    The job has a namespace: rights are given to an account of one.
    """
    own = _as_watcher(submission)
    account, *others, _ = manifests(own)
    return [account, *_rights(submission, own), *others, _job(submission, own)]


def _as_watcher(submission: Submission) -> Submission:
    """The watcher as a small job with the same files."""
    section, spec = submission.section, submission.spec
    given = section.volume
    storage = given.storage_class if isinstance(given, NewClaim) else None
    small = replace(
        section,
        mode="job",
        pods=1,
        gpus=0,
        cpu_millicores=100,
        memory_bytes=256 * _MIB,  # it was seen to take 76
        storage_bytes=_GIB,
        shm_bytes=_MIB,
        volume=NewClaim(size_bytes=_GIB, storage_class=storage),
        mounts=(),
        secrets=(),
        service_account=None,
        queue=None,
        priority_class=None,
        node_selector=(),
        tolerations=(),
        grace_s=10,
        deadline_s=None,
        pod_monitor=None,
    )
    metrics = replace(spec.metrics, listen=None)
    named = replace(spec, name=f"{spec.name}-watch", metrics=metrics)
    return replace(submission, spec=named, section=small)


def _job(submission: Submission, own: Submission) -> Manifest:
    template = pod.template(own)
    spec = template["spec"]
    spec["automountServiceAccountToken"] = True
    (container,) = spec["containers"]
    container["command"] = [pod.literal(word) for word in _command(submission)]
    known = ("HOME", "USER")
    container["env"] = [each for each in container["env"] if each["name"] in known]
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    final = {
        "containerName": own.container,
        "operator": "NotIn",
        "values": _OWN_CODES,
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        {"action": "FailJob", "onExitCodes": final},
    ]
    return {
        **made("batch/v1", "Job", own),
        "spec": {
            "backoffLimit": _RETRIES,
            # Two of them would decide twice.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "ttlSecondsAfterFinished": own.section.ttl_s,
            "template": template,
        },
    }


def _command(submission: Submission) -> list[str]:
    words = ["oomrun", "submit", "--watch", "--once", f"{JOB_FOLDER}/{JOB_FILE}"]
    for override in (*submission.overrides, *_measured(submission)):
        words += ["--set", override]
    return words


def _measured(submission: Submission) -> list[str]:
    """What a run here has shown, which the watcher cannot know."""
    section, need, found = submission.section, submission.gpu_need, []
    if section.gpus and section.gpu_memory == "auto" and need is not None:
        found.append(f"kubernetes.gpu_memory={-(-need.least_bytes // _MIB)}MiB")
    if section.grace_s == "auto" and submission.checkpoint_s:
        found.append(f"kubernetes.grace={submission.grace_s}s")
    return found


def _rights(submission: Submission, own: Submission) -> list[Manifest]:
    role = {**made(f"{_ROLES}/v1", "Role", own), "rules": _rules(submission)}
    account = {
        "kind": "ServiceAccount",
        "name": own.name,
        "namespace": own.section.namespace,
    }
    bound = {
        **made(f"{_ROLES}/v1", "RoleBinding", own),
        "roleRef": {"apiGroup": _ROLES, "kind": "Role", "name": own.name},
        "subjects": [account],
    }
    return [role, bound]


def _rules(submission: Submission) -> list[dict[str, Any]]:
    """Make what the job is made of; see and delete what has its name."""
    kinds = list(dict.fromkeys(each["kind"] for each in manifests(submission)))
    found = []
    for kind in kinds:
        group, plural = _RESOURCES[kind]
        whole = {"apiGroups": [group], "resources": [plural]}
        # Those of earlier files have names that are not known here.
        verbs = ["create", "list", "delete"] if kind == "ConfigMap" else ["create"]
        found.append({**whole, "verbs": verbs})
        if kind not in _KEPT:
            named = {"resourceNames": [submission.name], "verbs": ["get", "delete"]}
            found.append({**whole, **named})
    return [*found, {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
