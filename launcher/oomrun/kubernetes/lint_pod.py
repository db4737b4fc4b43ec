"""What is wrong with a pod: its volumes, resources, ports, variables, placement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from oomrun.core import kubernetes_syntax as syntax
from oomrun.kubernetes import quantities
from oomrun.kubernetes.finding import Findings, dig, listing, mapping

__all__ = ["check_pod", "containers"]

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_NODE_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_variable = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*", re.ASCII)


def containers(pod: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each container with its path."""
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(listing(pod.get(kind))):
            yield f"{path}.{kind}[{index}]", mapping(container)


def check_pod(pod: dict[str, Any], path: str, findings: Findings) -> None:
    """Report what a schema lets pass in a pod's ``spec``, which stands at ``path``."""
    _enums(pod, path, findings)
    volumes = _volumes(pod, path, findings)
    mounted: set[str] = set()
    names: set[Any] = set()
    for at, container in containers(pod, path):
        name = container.get("name")
        _is_new(names, name, f"{at}.name", "container", findings)
        good = isinstance(name, str) and syntax.is_dns_label(name)
        findings.fits(name, f"{at}.name", good, "a name such as worker")
        mounted |= _mounts(container, at, volumes, findings)
        _resources(mapping(container.get("resources")), f"{at}.resources", findings)
        _variables(container, at, findings)
        _ports(container, at, findings)
        _container_enums(container, at, findings)
    for name, at in volumes.items():
        if name not in mounted:
            findings.add(at, f"no container mounts the volume {name}")
    _placement(pod, path, findings)


def _enums(pod: dict[str, Any], path: str, findings: Findings) -> None:
    known = {
        "restartPolicy": ("Always", "OnFailure", "Never"),
        "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "preemptionPolicy": ("PreemptLowerPriority", "Never"),
    }
    for key, words in known.items():
        findings.one_of(pod.get(key), f"{path}.{key}", words)
    context = mapping(pod.get("securityContext"))
    at = f"{path}.securityContext"
    changes = ("OnRootMismatch", "Always")
    findings.one_of(
        context.get("fsGroupChangePolicy"), f"{at}.fsGroupChangePolicy", changes
    )
    profiles = ("RuntimeDefault", "Localhost", "Unconfined")
    profile = dig(context, "seccompProfile", "type")
    findings.one_of(profile, f"{at}.seccompProfile.type", profiles)
    grace = pod.get("terminationGracePeriodSeconds")
    if isinstance(grace, int) and grace < 0:
        at = f"{path}.terminationGracePeriodSeconds"
        findings.add(at, f"expected 0 or more, got {grace}")


def _container_enums(container: dict[str, Any], path: str, findings: Findings) -> None:
    known = {
        "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
        "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    }
    for key, words in known.items():
        findings.one_of(container.get(key), f"{path}.{key}", words)
    image = container.get("image")
    good = isinstance(image, str) and bool(image) and not re.search(r"\s", image)
    findings.fits(image, f"{path}.image", good, "an image")


def _is_new(
    seen: set[Any], value: Any, path: str, what: str, findings: Findings
) -> None:
    if isinstance(value, str | int) and value in seen:
        findings.add(path, f"there are two {what}s {value}")
    elif isinstance(value, str | int):
        seen.add(value)


def _volumes(pod: dict[str, Any], path: str, findings: Findings) -> dict[str, str]:
    """The path of each volume by its name."""
    found: dict[str, str] = {}
    for index, volume in enumerate(listing(pod.get("volumes"))):
        at, name = f"{path}.volumes[{index}]", mapping(volume).get("name")
        good = isinstance(name, str) and syntax.is_dns_label(name)
        findings.fits(name, f"{at}.name", good, "a name such as data")
        if name in found:
            findings.add(f"{at}.name", f"there are two volumes {name}")
        if good:
            found[str(name)] = at
        if len(mapping(volume)) != 2:
            findings.add(at, "expected a name and one source such as emptyDir")
        medium = dig(volume, "emptyDir", "medium")
        known = ("", "Memory", "HugePages")
        if isinstance(medium, str) and not medium.startswith("HugePages-"):
            findings.one_of(medium, f"{at}.emptyDir.medium", known)
        _quantity(dig(volume, "emptyDir", "sizeLimit"), f"{at}.emptyDir", findings)
        for number, item in enumerate(listing(dig(volume, "configMap", "items"))):
            _item(mapping(item), f"{at}.configMap.items[{number}]", findings)
    return found


def _item(item: dict[str, Any], path: str, findings: Findings) -> None:
    target = item.get("path")
    if not isinstance(target, str) or target.startswith("/") or not target:
        findings.add(f"{path}.path", f"expected a relative path, got {target!r}")
    elif ".." in target.split("/"):
        findings.add(f"{path}.path", f"{target} leads out of the volume")
    mode = item.get("mode")
    if isinstance(mode, int) and not 0 <= mode <= 0o777:
        findings.add(f"{path}.mode", f"expected 0 to 0777, got {mode}")


def _mounts(
    container: dict[str, Any],
    path: str,
    volumes: dict[str, str],
    findings: Findings,
) -> set[str]:
    """The names of the volumes that the container mounts."""
    used: set[str] = set()
    paths: set[Any] = set()
    for index, mount in enumerate(listing(container.get("volumeMounts"))):
        at, name = f"{path}.volumeMounts[{index}]", mapping(mount).get("name")
        if name not in volumes:
            findings.add(f"{at}.name", f"there is no volume {name}")
        used.add(str(name))
        target = mapping(mount).get("mountPath")
        _is_new(paths, target, f"{at}.mountPath", "mount", findings)
        if not isinstance(target, str) or not target.startswith("/") or ":" in target:
            findings.add(f"{at}.mountPath", f"expected an absolute path, got {target}")
    return used


def _quantity(value: Any, path: str, findings: Findings) -> Any:
    """The number of a quantity, or None where there is none that is right."""
    if value is None:
        return None
    try:
        number = quantities.parse(str(value))
    except ValueError as error:
        wrong = f"expected a quantity such as 500m or 16Gi, got {value}"
        findings.add(path, wrong, str(error))
        return None
    if number < 0:
        findings.add(path, f"expected 0 or more, got {value}")
    return number


def _resources(resources: dict[str, Any], path: str, findings: Findings) -> None:
    amounts: dict[str, dict[str, Any]] = {}
    for kind in ("requests", "limits"):
        amounts[kind] = {
            name: _quantity(value, f"{path}.{kind}.{name}", findings)
            for name, value in mapping(resources.get(kind)).items()
        }
    requests, limits = amounts["requests"], amounts["limits"]
    for name, limit in limits.items():
        at, asked = f"{path}.limits.{name}", requests.get(name)
        if limit is not None and asked is not None and asked > limit:
            findings.add(at, f"the request of {name} is larger than its limit")
        if _is_extended(name) and limit is not None:
            if limit.denominator != 1:
                findings.add(at, f"expected a whole number of {name}")
            if name in requests and asked is not None and asked != limit:
                wrong = f"request and limit of {name} must be the same"
                findings.add(f"{path}.requests.{name}", wrong)
    for name in requests:
        if _is_extended(name) and name not in limits:
            findings.add(f"{path}.requests.{name}", f"{name} needs a limit beside it")


def _is_extended(name: str) -> bool:
    return "/" in name and not name.startswith("kubernetes.io/")


def _variables(container: dict[str, Any], path: str, findings: Findings) -> None:
    seen: set[Any] = set()
    for index, variable in enumerate(listing(container.get("env"))):
        at, name = f"{path}.env[{index}]", mapping(variable).get("name")
        good = isinstance(name, str) and bool(_variable.fullmatch(name))
        findings.fits(name, f"{at}.name", good, "the name of a variable")
        _is_new(seen, name, f"{at}.name", "variable", findings)
        if {"value", "valueFrom"} <= set(mapping(variable)):
            findings.add(at, "value and valueFrom exclude each other")


def _ports(container: dict[str, Any], path: str, findings: Findings) -> None:
    names: set[Any] = set()
    for index, port in enumerate(listing(container.get("ports"))):
        at, name = f"{path}.ports[{index}]", mapping(port).get("name")
        if name is not None:
            good = isinstance(name, str) and syntax.is_port_name(name)
            words = "at most 15 lower-case letters, digits and '-'"
            findings.fits(name, f"{at}.name", good, words)
            _is_new(names, name, f"{at}.name", "port", findings)
        number = mapping(port).get("containerPort")
        if isinstance(number, int) and not 1 <= number <= 65535:
            findings.add(f"{at}.containerPort", f"expected 1 to 65535, got {number}")
        protocol = mapping(port).get("protocol")
        findings.one_of(protocol, f"{at}.protocol", ("TCP", "UDP", "SCTP"))


def _placement(pod: dict[str, Any], path: str, findings: Findings) -> None:
    for index, toleration in enumerate(listing(pod.get("tolerations"))):
        at, each = f"{path}.tolerations[{index}]", mapping(toleration)
        findings.one_of(each.get("operator"), f"{at}.operator", ("Exists", "Equal"))
        findings.one_of(each.get("effect"), f"{at}.effect", _EFFECTS)
        if each.get("operator") == "Exists" and each.get("value"):
            findings.add(f"{at}.value", "Exists takes no value")
    base = f"{path}.affinity.nodeAffinity"
    for at, expression in _expressions(dig(pod, "affinity", "nodeAffinity"), base):
        operator, values = expression.get("operator"), listing(expression.get("values"))
        findings.one_of(operator, f"{at}.operator", _NODE_OPERATORS)
        if operator in ("Gt", "Lt"):
            number = str(values[0]) if len(values) == 1 else ""
            good = bool(re.fullmatch(r"-?[0-9]{1,18}", number, re.ASCII))
            findings.fits(values, f"{at}.values", good, "one whole number in quotes")


def _expressions(affinity: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    terms = [
        (f"{path}.{required}.nodeSelectorTerms[{index}]", term)
        for index, term in enumerate(
            listing(dig(affinity, required, "nodeSelectorTerms"))
        )
    ]
    terms += [
        (f"{path}.{preferred}[{index}].preference", dig(term, "preference"))
        for index, term in enumerate(listing(dig(affinity, preferred)))
    ]
    for at, term in terms:
        for index, each in enumerate(listing(dig(term, "matchExpressions"))):
            yield f"{at}.matchExpressions[{index}]", mapping(each)
