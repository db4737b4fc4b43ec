"""Where a pod is not what Pod Security's profile "restricted" lets in."""

from __future__ import annotations

from typing import Any

from oomrun.kubernetes.finding import Findings, dig, listing, mapping
from oomrun.kubernetes.lint_pod import containers

__all__ = ["check_security"]

_VOLUMES = frozenset(
    {
        "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image",
        "persistentVolumeClaim", "projected", "secret",
    }
)  # fmt: skip
_PROFILE = 'the profile "restricted" of Pod Security'


def check_security(pod: dict[str, Any], path: str, findings: Findings) -> None:
    """Report each such place of a pod's ``spec``, which stands at ``path``."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            findings.add(f"{path}.{key}", f"{_PROFILE} does not let it in")
    for index, volume in enumerate(listing(pod.get("volumes"))):
        for source in mapping(volume):
            if source not in _VOLUMES and source != "name":
                at = f"{path}.volumes[{index}].{source}"
                findings.add(at, f"{_PROFILE} lets no {source} in")
    whole = mapping(pod.get("securityContext"))
    for at, container in containers(pod, path):
        _container(mapping(container.get("securityContext")), whole, at, findings)


def _container(
    own: dict[str, Any], whole: dict[str, Any], path: str, findings: Findings
) -> None:
    at = f"{path}.securityContext"
    both = {**whole, **own}
    if both.get("runAsNonRoot") is not True:
        findings.add(f"{at}.runAsNonRoot", f"{_PROFILE} wants true")
    if both.get("runAsUser") == 0:
        findings.add(f"{at}.runAsUser", f"{_PROFILE} does not let root in")
    if dig(both, "seccompProfile", "type") not in ("RuntimeDefault", "Localhost"):
        findings.add(f"{at}.seccompProfile", f"{_PROFILE} wants RuntimeDefault")
    if own.get("privileged"):
        findings.add(f"{at}.privileged", f"{_PROFILE} does not let it in")
    if own.get("allowPrivilegeEscalation") is not False:
        findings.add(f"{at}.allowPrivilegeEscalation", f"{_PROFILE} wants false")
    capabilities = mapping(own.get("capabilities"))
    if "ALL" not in listing(capabilities.get("drop")):
        findings.add(f"{at}.capabilities.drop", f"{_PROFILE} wants [ALL]")
    for added in listing(capabilities.get("add")):
        if added != "NET_BIND_SERVICE":
            findings.add(f"{at}.capabilities.add", f"{_PROFILE} lets no {added} in")
