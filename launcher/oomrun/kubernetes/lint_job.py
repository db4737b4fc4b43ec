"""What is wrong with a Job beside its pods."""

from __future__ import annotations

from typing import Any

from oomrun.core import kubernetes_syntax as syntax
from oomrun.kubernetes.finding import Findings, dig, listing, mapping

__all__ = ["check_job"]

_POLICY = "spec.podFailurePolicy"


def check_job(job: dict[str, Any], findings: Findings) -> None:
    """Report what a schema lets pass and the API server does not."""
    spec = mapping(job.get("spec"))
    _names(job, spec, findings)
    _indexes(spec, findings)
    restart = dig(spec, "template", "spec", "restartPolicy")
    path = "spec.template.spec.restartPolicy"
    if restart not in ("Never", "OnFailure"):
        findings.add(path, f"expected Never or OnFailure in a Job, got {restart}")
    findings.one_of(
        spec.get("podReplacementPolicy"),
        "spec.podReplacementPolicy",
        ("Failed", "TerminatingOrFailed"),
    )
    if "podFailurePolicy" in spec:
        _failure_policy(spec, findings)
    for key in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        value = spec.get(key)
        if isinstance(value, int) and value < 0:
            findings.add(f"spec.{key}", f"expected 0 or more, got {value}")


def _names(job: dict[str, Any], spec: dict[str, Any], findings: Findings) -> None:
    name = dig(job, "metadata", "name")
    count = spec.get("completions")
    if not isinstance(name, str) or spec.get("completionMode") != "Indexed":
        return
    host = f"{name}-{max(0, count - 1) if isinstance(count, int) else 0}"
    if not syntax.is_dns_label(host):
        wrong = f"a pod's host would be {host}, which is no name of a host"
        findings.add("metadata.name", wrong, "at most 63 characters with the index")


def _indexes(spec: dict[str, Any], findings: Findings) -> None:
    mode = spec.get("completionMode")
    findings.one_of(mode, "spec.completionMode", ("NonIndexed", "Indexed"))
    if "backoffLimitPerIndex" in spec and mode != "Indexed":
        findings.add(
            "spec.backoffLimitPerIndex", "needs completionMode: Indexed beside it"
        )
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        findings.add("spec.maxFailedIndexes", "needs backoffLimitPerIndex beside it")
    if mode == "Indexed" and spec.get("completions") is None:
        findings.add("spec.completionMode", "Indexed needs completions beside it")
    if "successPolicy" in spec and mode != "Indexed":
        findings.add("spec.successPolicy", "needs completionMode: Indexed beside it")


def _failure_policy(spec: dict[str, Any], findings: Findings) -> None:
    if dig(spec, "template", "spec", "restartPolicy") != "Never":
        findings.add(_POLICY, "needs restartPolicy: Never in the pod template")
    if spec.get("podReplacementPolicy") not in (None, "Failed"):
        findings.add("spec.podReplacementPolicy", "podFailurePolicy needs Failed here")
    pod = dig(spec, "template", "spec")
    containers = {
        mapping(each).get("name")
        for kind in ("containers", "initContainers")
        for each in listing(mapping(pod).get(kind))
    }
    for index, rule in enumerate(listing(dig(spec, "podFailurePolicy", "rules"))):
        path = f"{_POLICY}.rules[{index}]"
        _rule(mapping(rule), path, spec, findings)
        named = dig(rule, "onExitCodes", "containerName")
        if named is not None and named not in containers:
            at = f"{path}.onExitCodes.containerName"
            findings.add(at, f"there is no container {named}")


def _rule(
    rule: dict[str, Any], path: str, spec: dict[str, Any], findings: Findings
) -> None:
    action = rule.get("action")
    known = ("FailJob", "FailIndex", "Ignore", "Count")
    if action not in known:
        findings.add(f"{path}.action", f"expected {' or '.join(known)}, got {action}")
    if action == "FailIndex" and "backoffLimitPerIndex" not in spec:
        findings.add(f"{path}.action", "FailIndex needs backoffLimitPerIndex")
    kinds = [key for key in ("onExitCodes", "onPodConditions") if rule.get(key)]
    if len(kinds) != 1:
        findings.add(path, "expected one of onExitCodes and onPodConditions")
    codes = mapping(rule.get("onExitCodes"))
    if codes:
        _exit_codes(codes, f"{path}.onExitCodes", findings)
    for number, condition in enumerate(listing(rule.get("onPodConditions"))):
        at = f"{path}.onPodConditions[{number}].status"
        status = mapping(condition).get("status")
        if status not in ("True", "False", "Unknown"):
            findings.add(at, f'expected "True" in quotes, got {status!r}')


def _exit_codes(codes: dict[str, Any], path: str, findings: Findings) -> None:
    operator, values = codes.get("operator"), listing(codes.get("values"))
    if operator not in ("In", "NotIn"):
        findings.add(f"{path}.operator", f"expected In or NotIn, got {operator}")
    at = f"{path}.values"
    numbers = [value for value in values if isinstance(value, int)]
    if not 1 <= len(values) <= 255:
        findings.add(at, "expected 1 to 255 exit codes")
    if numbers != sorted(set(numbers)):
        findings.add(at, "expected exit codes in ascending order, each once")
    if operator == "In" and 0 in numbers:
        findings.add(at, "0 is no failure")
