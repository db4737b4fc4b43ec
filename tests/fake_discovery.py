"""What kubectl asks of an API server before it does anything.

Which kinds there are, and that the server itself checks fields.
"""

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
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
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
    if path == "/openapi/v3":
        paths = (f"apis/{name}" if "/" in name else f"api/{name}" for name in GROUPS)
        url = "serverRelativeURL"
        return {"paths": {name: {url: f"/openapi/v3/{name}"} for name in paths}}
    if path.startswith("/openapi/v3/"):
        return _open_api(path.removeprefix("/openapi/v3"))
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


def _open_api(path: str) -> dict[str, Any]:
    """No more of it than kubectl looks for: that patches can be checked and tried."""
    name = path.removeprefix("/apis/").removeprefix("/api/")
    group, _, version = name.rpartition("/")
    asked = ("dryRun", "fieldValidation")
    parameters = [{"name": each, "in": "query"} for each in asked]
    paths = {}
    for plural, kind in GROUPS[name].items():
        known = {"group": group, "version": version, "kind": kind}
        patch = {"parameters": parameters, "x-kubernetes-group-version-kind": known}
        where = f"{path}/namespaces/{{namespace}}/{plural}/{{name}}"
        paths[where] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "x", "version": "1"}, "paths": paths}


def _group(name: str) -> dict[str, Any]:
    group, _, version = name.partition("/")
    told = {"groupVersion": name, "version": version}
    return {"name": group, "versions": [told], "preferredVersion": told}
