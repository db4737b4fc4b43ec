"""What kubectl asks of an API server before it does anything: which kinds there are."""

from __future__ import annotations

from typing import Any

#: For each group and version the kinds by their plurals.
GROUPS = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "monitoring.coreos.com/v1": {"podmonitors": "PodMonitor"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "kubeflow.org/v2beta1": {"mpijobs": "MPIJob"},
    "trainer.kubeflow.org/v1alpha1": {
        "trainjobs": "TrainJob",
        "trainingruntimes": "TrainingRuntime",
    },
}
_VERBS = ["create", "delete", "get", "list", "patch", "watch"]


def answer(path: str) -> dict[str, Any] | None:
    """The document at a path; None where it is none of discovery."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name) for name in GROUPS if "/" in name],
        }
    group = path.removeprefix("/apis/").removeprefix("/api/")
    if group not in GROUPS:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group,
        "resources": [
            {
                "name": plural,
                "singularName": "",
                "namespaced": True,
                "kind": kind,
                "verbs": _VERBS,
            }
            for plural, kind in GROUPS[group].items()
        ],
    }


def group_and_kind(plural: str) -> tuple[str, str]:
    """Of the kind with this plural; "v1" and "" where kubectl is not told of it."""
    found = ((name, kinds[plural]) for name, kinds in GROUPS.items() if plural in kinds)
    return next(found, ("v1", ""))


def _group(name: str) -> dict[str, Any]:
    group, _, version = name.partition("/")
    told = {"groupVersion": name, "version": version}
    return {"name": group, "versions": [told], "preferredVersion": told}
