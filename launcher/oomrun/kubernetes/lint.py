"""What is wrong with objects that a schema lets pass.

Covers: names, labels, what goes together in a Job, in a pod and between the objects of
one set; the "restricted" profile; fields that a version does not have. Does not cover:
unknown fields and types, which the API server and JSON schemas tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from oomrun.core import kubernetes_syntax as syntax
from oomrun.kubernetes.finding import Finding, Findings, dig, listing, mapping
from oomrun.kubernetes.lint_job import check_job
from oomrun.kubernetes.lint_pod import check_pod, containers
from oomrun.kubernetes.lint_security import check_security
from oomrun.kubernetes.submission import CONFIG_LIMIT_BYTES
from oomrun.kubernetes.versions import Version, check_version

__all__ = ["lint"]

Manifest = dict[str, Any]

_LONGEST_ANNOTATIONS = 256 * 1024
_POD = "spec.template.spec"
# Where the pod of a kind is.
_TEMPLATES = {
    "Pod": ("spec",),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
}
_WITH_TEMPLATE = frozenset({"Job", "Deployment", "StatefulSet", "DaemonSet"})
_NAMES: dict[str, tuple[Callable[[str], bool], str]] = {
    "Service": (syntax.is_dns_1035, "a letter first, then letters, digits and '-'"),
    "Namespace": (syntax.is_dns_label, "lower-case letters, digits and '-'"),
    "Job": (syntax.is_dns_label, "at most 63 lower-case letters, digits and '-'"),
}


def lint(
    manifests: Sequence[Manifest], version: Version | None = None
) -> list[list[Finding]]:
    """What is wrong with each of the objects, in their order.

    Args:
        manifests: one set: what they name of each other is looked up in it.
        version: of the cluster; None: fields are not held against a version.
    """
    all_findings = [_lint_one(manifest, version) for manifest in manifests]
    _duplicates(manifests, all_findings)
    for manifest, findings in zip(manifests, all_findings, strict=True):
        _references(manifest, manifests, findings)
    return [findings.found for findings in all_findings]


def _lint_one(manifest: Manifest, version: Version | None) -> Findings:
    findings = Findings()
    kind = manifest.get("kind")
    for key in ("apiVersion", "kind"):
        value = manifest.get(key)
        findings.fits(value, key, isinstance(value, str) and bool(value), f"the {key}")
    _metadata(manifest, str(kind), findings)
    if kind == "Job":
        check_job(manifest, findings)
        _selected(manifest, findings)
    for pod, path in _pods(manifest):
        check_pod(pod, path, findings)
        check_security(pod, path, findings)
        if path.endswith(".template.spec"):
            labels = dig(
                _at(manifest, path.removesuffix(".spec")), "metadata", "labels"
            )
            _labels(labels, f"{path.removesuffix('.spec')}.metadata.labels", findings)
    for job, path in _inner_jobs(manifest):
        check_job(job, findings.below(path))
    if kind == "ConfigMap":
        _config_map(manifest, findings)
    if kind == "PersistentVolumeClaim":
        modes = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
        for index, mode in enumerate(listing(dig(manifest, "spec", "accessModes"))):
            findings.one_of(mode, f"spec.accessModes[{index}]", modes)
    if kind == "NetworkPolicy":
        for index, each in enumerate(listing(dig(manifest, "spec", "policyTypes"))):
            findings.one_of(each, f"spec.policyTypes[{index}]", ("Ingress", "Egress"))
    if kind in ("RoleBinding", "ClusterRoleBinding"):
        _subjects(manifest, findings)
    if version is not None:
        check_version(manifest, version, findings)
    return findings


def _pods(manifest: Manifest) -> list[tuple[dict[str, Any], str]]:
    """Each pod that the object describes, with its path."""
    kind = manifest.get("kind")
    if kind in _WITH_TEMPLATE:
        return [(mapping(dig(manifest, "spec", "template", "spec")), _POD)]
    if kind in _TEMPLATES:
        keys = _TEMPLATES[str(kind)]
        return [(mapping(dig(manifest, *keys)), ".".join(keys))]
    if kind == "MPIJob":
        replicas = mapping(dig(manifest, "spec", "mpiReplicaSpecs"))
        return [
            (
                mapping(dig(each, "template", "spec")),
                f"spec.mpiReplicaSpecs.{name}.template.spec",
            )
            for name, each in replicas.items()
        ]
    return [
        (mapping(dig(job, "spec", "template", "spec")), f"{path}.{_POD}")
        for job, path in _inner_jobs(manifest)
    ]


def _inner_jobs(manifest: Manifest) -> list[tuple[Manifest, str]]:
    """The Jobs that a JobSet has, or a runtime that is one, each with its path."""
    where = {"JobSet": "spec", "TrainingRuntime": "spec.template.spec"}
    base = where.get(str(manifest.get("kind")))
    if base is None:
        return []
    jobs = listing(dig(_at(manifest, base), "replicatedJobs"))
    return [
        (mapping(dig(job, "template")), f"{base}.replicatedJobs[{index}].template")
        for index, job in enumerate(jobs)
    ]


def _at(manifest: Manifest, path: str) -> Any:
    """What is at a path of the object."""
    value: Any = manifest
    for key in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = mapping(value).get(key)
    return value


def _metadata(manifest: Manifest, kind: str, findings: Findings) -> None:
    metadata = mapping(manifest.get("metadata"))
    name = metadata.get("name")
    if name is not None or "generateName" not in metadata:
        good, words = _NAMES.get(kind, (syntax.is_dns_subdomain, "a DNS name"))
        fits = isinstance(name, str) and good(name)
        findings.fits(name, "metadata.name", fits, words)
    namespace = metadata.get("namespace")
    if namespace is not None:
        fits = isinstance(namespace, str) and syntax.is_dns_label(namespace)
        findings.fits(namespace, "metadata.namespace", fits, "a namespace")
    _labels(metadata.get("labels"), "metadata.labels", findings)
    annotations = mapping(metadata.get("annotations"))
    for key, value in annotations.items():
        path = f"metadata.annotations.{key}"
        findings.fits(key, path, syntax.is_qualified_name(key), "an annotation's key")
        findings.fits(value, path, isinstance(value, str), "a text in quotes")
    size = sum(len(f"{key}{value}".encode()) for key, value in annotations.items())
    if size > _LONGEST_ANNOTATIONS:
        findings.add("metadata.annotations", "they have more than 256 KiB in all")


def _labels(labels: Any, path: str, findings: Findings) -> None:
    for key, value in mapping(labels).items():
        at = f"{path}.{key}"
        findings.fits(key, at, syntax.is_qualified_name(key), "a label's key")
        good = isinstance(value, str) and syntax.is_label_value(value)
        findings.fits(value, at, good, "a label's value, a text in quotes")


def _selected(job: Manifest, findings: Findings) -> None:
    """A selector of one's own, which a Job should not have, must fit its pods."""
    if dig(job, "spec", "selector") and not dig(job, "spec", "manualSelector"):
        findings.add("spec.selector", "needs manualSelector: true", "or leave it out")


def _subjects(manifest: Manifest, findings: Findings) -> None:
    """An account is one of a namespace, and no default stands for it."""
    for index, each in enumerate(map(mapping, listing(manifest.get("subjects")))):
        if each.get("kind") == "ServiceAccount" and not each.get("namespace"):
            at = f"subjects[{index}].namespace"
            findings.add(at, "a ServiceAccount needs its namespace beside it")


def _config_map(manifest: Manifest, findings: Findings) -> None:
    size = 0
    for part in ("data", "binaryData"):
        for key, value in mapping(manifest.get(part)).items():
            good = syntax.is_config_key(key)
            findings.fits(key, f"{part}.{key}", good, "letters, digits, '.', '-', '_'")
            taken = len(str(value).encode(errors="replace"))
            size += taken if part == "data" else taken * 3 // 4
    if size > CONFIG_LIMIT_BYTES:
        wrong = f"it holds {size} bytes, and may hold {CONFIG_LIMIT_BYTES}"
        findings.add("data", wrong, "put large files into the image or on a volume")
    twice = set(mapping(manifest.get("data"))) & set(
        mapping(manifest.get("binaryData"))
    )
    for key in sorted(twice):
        findings.add(f"binaryData.{key}", "it is in data, too")


def _duplicates(manifests: Sequence[Manifest], found: Sequence[Findings]) -> None:
    seen = set()
    for manifest, findings in zip(manifests, found, strict=True):
        key = _key(manifest)
        if key in seen and key[2]:
            findings.add("metadata.name", f"there are two {key[0]} {key[2]}")
        seen.add(key)


def _key(manifest: Manifest) -> tuple[str, str, str]:
    namespace = dig(manifest, "metadata", "namespace")
    name = dig(manifest, "metadata", "name")
    return str(manifest.get("kind")), str(namespace or ""), str(name or "")


def _references(
    manifest: Manifest, manifests: Sequence[Manifest], findings: Findings
) -> None:
    """Keys that a pod takes of a ConfigMap which is in the set but has no such key."""
    for pod, path in _pods(manifest):
        _references_of(pod, path, _key(manifest)[1], manifests, findings)


def _references_of(
    pod: dict[str, Any],
    path: str,
    namespace: str,
    manifests: Sequence[Manifest],
    findings: Findings,
) -> None:
    maps = {_key(each): each for each in manifests}
    for index, volume in enumerate(listing(pod.get("volumes"))):
        source = mapping(dig(volume, "configMap"))
        config = maps.get(("ConfigMap", namespace, str(source.get("name"))))
        if config is None:
            continue
        known = _keys_of(config)
        for number, item in enumerate(listing(source.get("items"))):
            key = mapping(item).get("key")
            if key not in known:
                at = f"{path}.volumes[{index}].configMap.items[{number}].key"
                findings.add(at, f"the ConfigMap has no key {key}")
    _containers_are_there(pod, path, findings)


def _keys_of(config: Manifest) -> set[Any]:
    parts: Iterable[str] = ("data", "binaryData")
    return {key for part in parts for key in mapping(config.get(part))}


def _containers_are_there(pod: dict[str, Any], path: str, findings: Findings) -> None:
    if not any(".containers[" in at for at, _ in containers(pod, path)):
        findings.add(f"{path}.containers", "expected a container")
