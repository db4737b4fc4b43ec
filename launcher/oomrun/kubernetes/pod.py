"""The pod of a job: what runs in it, as whom, with what, and where it may be placed.

Covers: the pod template, and how files are named in the ConfigMap. Does not cover: the
objects around it (``manifests``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oomrun.core import last_words
from oomrun.core.kubernetes_spec import (
    JOB_FILE,
    JOB_FOLDER,
    WORKSPACE,
    Claim,
    Toleration,
)
from oomrun.kubernetes.quantities import binary, cores
from oomrun.kubernetes.submission import Shipped, Submission

__all__ = ["METRICS", "config_keys", "literal", "template"]

#: The name of the port of the metrics.
METRICS = "metrics"

_MIB = 2**20
# The kubelet makes it, and keeps what is in it at the end.
_LAST_WORDS = "/dev/termination-log"
# The variable with the pod's index, and where it is from.
_MEMBER = "OOMRUN_MEMBER"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# What oomrun leaves of the grace to the kubelet and to its own end.
_GRACE_MARGIN_S = 10


def template(
    submission: Submission, *, member: str = "", index_of: str = _INDEX
) -> dict[str, Any]:
    """The pod template.

    Args:
        submission: the job.
        member: which of several pods it is, where that is not its index, or what to
            add the index to.
        index_of: the field of a pod that tells its index.
    """
    section = submission.section
    annotations: dict[str, str] = {}
    # Only one pod has metrics, and annotations are alike in all of them.
    if submission.metrics_port is not None and section.pods == 1:
        annotations |= {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(submission.metrics_port),
        }
        if submission.spec.metrics.tls:
            annotations["prometheus.io/scheme"] = "https"
    annotations |= dict(section.annotations)  # who asks for another scrape gets it
    metadata: dict[str, Any] = {"labels": dict(submission.labels)}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": _spec(submission, member, index_of)}


def config_keys(submission: Submission) -> dict[str, Shipped]:
    """The key of each file in the ConfigMap, where a path's slashes cannot be."""
    keys = {JOB_FILE: submission.all_files[0]}
    for number, file in enumerate(submission.files, 1):
        keys[f"{number}-{file.path.rpartition('/')[2]}"] = file
    return keys


def literal(text: str) -> str:
    """The text as a container gets it: the kubelet fills in $(NAME), and $$ is $."""
    return text.replace("$", "$$")


def _spec(submission: Submission, member: str, index_of: str) -> dict[str, Any]:
    section = submission.section
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": submission.grace_s,
        "serviceAccountName": section.service_account or submission.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": section.user,
            "runAsGroup": section.user,
            "fsGroup": section.user,
            # Going through a large volume to change its owner can take hours.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(submission, member, index_of)],
        "volumes": _volumes(submission),
    }
    if section.pods > 1 and section.mode == "job":
        spec["subdomain"] = submission.name  # the operators set it themselves
    if section.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in section.pull_secrets]
    if section.priority_class is not None:
        spec["priorityClassName"] = section.priority_class
    return {**spec, **_placement(submission)}


def _container(submission: Submission, member: str, index_of: str) -> dict[str, Any]:
    section = submission.section
    container: dict[str, Any] = {
        "name": submission.container,
        "image": section.image,
        "command": [
            *(literal(word) for word in _command(submission)),
            *_gang(submission, member),
        ],
        "workingDir": WORKSPACE,
        "env": _environment(submission, member, index_of),
        "resources": _resources(submission),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # The last words are in the file, or else the last lines of what it said.
        "terminationMessagePath": _LAST_WORDS,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(submission),
    }
    if section.secrets:
        named = [{"secretRef": {"name": name}} for name in section.secrets]
        container["envFrom"] = named
    if submission.metrics_port is not None:
        port = {"name": METRICS, "containerPort": submission.metrics_port}
        container["ports"] = [{**port, "protocol": "TCP"}]
    return container


def _command(submission: Submission) -> list[str]:
    grace_s = submission.grace_s - _GRACE_MARGIN_S
    words = ["oomrun", "run", f"{JOB_FOLDER}/{JOB_FILE}", "--view", "plain"]
    words += ["--grace", f"{grace_s}s"]
    for override in submission.overrides:
        words += ["--set", override]
    if submission.metrics_port is not None:
        # Within the pod alone nobody could scrape them.
        words += ["--set", f'metrics.listen="0.0.0.0:{submission.metrics_port}"']
    return words


def _gang(submission: Submission, member: str) -> list[str]:
    """The options of one of several pods; the kubelet fills the index in."""
    if submission.section.pods == 1:
        return []
    index = f"$({_MEMBER})" if member in ("", "1+") else ""
    words = ["--gang", str(submission.section.pods), "--member", f"{member}{index}"]
    return [*words, "--meet", submission.meeting]


def _environment(
    submission: Submission, member: str, index_of: str
) -> list[dict[str, Any]]:
    # The user id has no entry in the image's passwd, and its home no place there.
    named = {"HOME": WORKSPACE, "USER": "oomrun", last_words.VARIABLE: _LAST_WORDS}
    if submission.section.gpus == 0:
        # Images made for CUDA would be shown all GPUs of the node otherwise.
        named["NVIDIA_VISIBLE_DEVICES"] = "void"
    told: list[dict[str, Any]] = [
        {"name": name, "value": literal(value)} for name, value in named.items()
    ]
    if submission.section.pods > 1 and member != "0":
        source = {"fieldRef": {"fieldPath": index_of}}
        told.append({"name": _MEMBER, "valueFrom": source})
    return told


def _resources(submission: Submission) -> dict[str, Any]:
    """Requests and limits alike, so that the kernel takes other pods first."""
    section = submission.section
    amounts = {
        "cpu": cores(section.cpu_millicores),
        "memory": binary(section.memory_bytes),
        "ephemeral-storage": binary(section.storage_bytes),
    }
    if section.gpus:
        amounts[section.gpu_resource] = str(section.gpus)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _volumes(submission: Submission) -> list[dict[str, Any]]:
    section = submission.section
    storage = binary(section.storage_bytes)
    workspace: dict[str, Any]
    if section.volume is None:
        workspace = {"emptyDir": {"sizeLimit": storage}}
    else:
        given = section.volume
        name = given.name if isinstance(given, Claim) else submission.name
        workspace = {"persistentVolumeClaim": {"claimName": name}}
    shm = {"medium": "Memory", "sizeLimit": binary(section.shm_bytes)}
    return [
        {"name": "job", "configMap": _config(submission)},
        {"name": "workspace", **workspace},
        {"name": "tmp", "emptyDir": {"sizeLimit": storage}},
        {"name": "shm", "emptyDir": shm},
        *(
            {
                "name": f"mount-{number}",
                "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
            }
            for number, (_, claim) in enumerate(section.mounts, 1)
        ),
    ]


def _config(submission: Submission) -> dict[str, Any]:
    items = []
    for key, file in config_keys(submission).items():
        mode = 0o555 if file.executable else 0o444
        items.append({"key": key, "path": file.path, "mode": mode})
    return {"name": submission.config_name, "items": items}


def _mounts(submission: Submission) -> list[dict[str, Any]]:
    return [
        {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
        {"name": "workspace", "mountPath": WORKSPACE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *(
            {"name": f"mount-{number}", "mountPath": path, "readOnly": True}
            for number, (path, _) in enumerate(submission.section.mounts, 1)
        ),
    ]


def _placement(submission: Submission) -> dict[str, Any]:
    section = submission.section
    placed: dict[str, Any] = {}
    if section.node_selector:
        placed["nodeSelector"] = dict(section.node_selector)
    tolerations = [_toleration(each) for each in section.tolerations]
    if section.gpus:
        gpu = Toleration(key="nvidia.com/gpu", effect="NoSchedule")
        tolerations.insert(0, _toleration(gpu))
    if tolerations:
        placed["tolerations"] = tolerations
    affinity = _affinity(submission) if section.gpus else {}
    return {**placed, "affinity": {"nodeAffinity": affinity}} if affinity else placed


def _toleration(toleration: Toleration) -> dict[str, str]:
    made = {"key": toleration.key, "operator": "Exists"}
    if toleration.value is not None:
        made |= {"operator": "Equal", "value": toleration.value}
    return made if toleration.effect is None else {**made, "effect": toleration.effect}


def _affinity(submission: Submission) -> dict[str, Any]:
    """Nodes whose GPUs are large enough, by GPU Feature Discovery's labels in MiB."""
    asked, need = submission.section.gpu_memory, submission.gpu_need
    least = asked if isinstance(asked, int) else None
    whole = None
    if asked == "auto" and need is not None:
        least, whole = need.least_bytes, need.whole_bytes
    found: dict[str, Any] = {}
    label = f"{submission.section.gpu_resource}.memory"
    if least is not None:
        terms = [_more_than(label, least)]
        found["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": terms
        }
    if whole is not None and whole != least:
        preferred = {"weight": 100, "preference": _more_than(label, whole)}
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [preferred]
    return found


def _more_than(label: str, least_bytes: int) -> Mapping[str, Sequence[Any]]:
    # Gt is "greater than", so one less than the smallest that will do.
    below = -(-least_bytes // _MIB) - 1
    named = {"key": label, "operator": "Gt", "values": [str(below)]}
    return {"matchExpressions": [named]}
