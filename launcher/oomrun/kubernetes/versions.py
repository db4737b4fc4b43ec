"""Kubernetes's versions, and since which of them it has the fields of a job.

Covers: 1.29 to 1.37, the versions that the manifests were checked against. Does not
cover: fields that all of these have.
"""

from __future__ import annotations

import re
from typing import Any

from oomrun.kubernetes.finding import Findings, dig, mapping
from oomrun.kubernetes.lint_pod import containers

__all__ = ["NEWEST", "OLDEST", "Version", "check_version", "parse_version"]

Version = tuple[int, int]

OLDEST: Version = (1, 29)
NEWEST: Version = (1, 37)

# Since when the API server keeps them without a feature gate that must be turned on.
_OF_JOB = {"successPolicy": (1, 31), "managedBy": (1, 32)}
_OF_POD = {"hostUsers": (1, 33), "resources": (1, 34), "resourceClaims": (1, 34)}
_OF_CONTAINER = {"restartPolicyRules": (1, 35), "resizePolicy": (1, 33)}


def parse_version(text: str) -> Version:
    """The version that a text such as 1.31 or v1.31.4 names.

    Raises:
        ValueError: it is none, or one that nothing was checked against.
    """
    match = re.fullmatch(r"v?1\.([0-9]{1,2})(?:\.[0-9]+)?(?:[-+].*)?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no version such as 1.31")
    version = (1, int(match[1]))
    if not OLDEST <= version <= NEWEST:
        raise ValueError(
            f"{text} is not supported: from {_said(OLDEST)} to {_said(NEWEST)}"
        )
    return version


def check_version(manifest: dict[str, Any], version: Version, found: Findings) -> None:
    """Report each field of a Job or a Pod that this version does not have yet."""
    kind = manifest.get("kind")
    spec = mapping(manifest.get("spec"))
    if kind == "Job":
        _check(spec, "spec", _OF_JOB, version, found)
    pod, path = (spec, "spec") if kind == "Pod" else (_pod(spec), "spec.template.spec")
    _check(pod, path, _OF_POD, version, found)
    for at, container in containers(pod, path):
        _check(container, at, _OF_CONTAINER, version, found)


def _pod(spec: dict[str, Any]) -> dict[str, Any]:
    return mapping(dig(spec, "template", "spec"))


def _check(
    value: dict[str, Any],
    path: str,
    since: dict[str, Version],
    version: Version,
    found: Findings,
) -> None:
    for key, first in since.items():
        if key in value and version < first:
            wrong = f"Kubernetes {_said(version)} does not have it"
            found.add(f"{path}.{key}", wrong, f"it came with {_said(first)}")


def _said(version: Version) -> str:
    return ".".join(map(str, version))
