"""The lint finds what it is for: one bad example each, and nothing in good ones."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_jobs as jobs
from bad_manifests import (
    BAD,
    GOOD,
    IN_CONTAINER,
    IN_POD,
    Bad,
    Change,
    by_kind,
    container,
    pod,
)
from oomrun.kubernetes import finding, versions
from oomrun.kubernetes.finding import Findings
from oomrun.kubernetes.lint import lint
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.reading import Unreadable, read


def found_in(bad: Bad) -> list[tuple[str, str]]:
    """What is found in the object that it changes, beside the other good ones."""
    changed = by_kind(bad.kind)
    others = [each for each in GOOD if each != changed]
    bad.change(changed)
    *_, findings = lint([*others, changed], bad.version)
    return [(finding.path, finding.message) for finding in findings]


def test_there_is_nothing_in_the_good_ones() -> None:
    assert not any(lint(GOOD, (1, 29)))
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_a_bad_example(bad: Bad) -> None:
    found = found_in(bad)
    assert any(at == bad.path and bad.said in message for at, message in found), found


def test_each_rule_has_a_bad_example() -> None:
    """Each place in the lint that reports something is come to by one of them."""
    reached: set[tuple[str, int]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is Findings.add.__code__:
            caller = frame.f_back
            while Path(caller.f_code.co_filename) == Path(finding.__file__):
                caller = caller.f_back
            reached.add((caller.f_code.co_filename, caller.f_lineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for bad in BAD:
            found_in(bad)
    finally:
        sys.setprofile(before)
    rules = list(reporting(Path(finding.__file__).parent))
    assert len(rules) > 70
    without = [
        f"{path.name}:{call.lineno}: {ast.unparse(call)}"
        for path, call in rules
        if not any(
            path == Path(file) and call.lineno <= line <= (call.end_lineno or 0)
            for file, line in reached
        )
    ]
    assert without == []


def reporting(folder: Path) -> Iterator[tuple[Path, ast.Call]]:
    """Each call that reports a finding."""
    for path in folder.glob("*.py"):
        if path == Path(finding.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id="findings"), attr="add" | "one_of" | "fits"
                    )
                ):
                    yield path, node


@pytest.mark.parametrize(
    ("version", "change", "path"),
    [
        ((1, 30), lambda j: j["spec"].update(successPolicy={}), "spec.successPolicy"),
        ((1, 32), lambda j: pod(j).update(hostUsers=False), f"{IN_POD}.hostUsers"),
        ((1, 34), lambda j: container(j).update(restartPolicyRules=[]),
         f"{IN_CONTAINER}.restartPolicyRules"),
    ],
)  # fmt: skip
def test_fields_that_a_version_does_not_have(
    version: tuple[int, int], change: Change, path: str
) -> None:
    job = by_kind("Job")
    change(job)
    (findings,) = lint([job], version)
    assert [finding.path for finding in findings] == [path]
    newer = (version[0], version[1] + 1)
    assert lint([job], newer) == [[]]


@pytest.mark.parametrize("text", ["1.29", "1.37", "v1.31", "v1.33.2", "1.30.1-gke.5"])
def test_versions(text: str) -> None:
    version = versions.parse_version(text)
    assert versions.OLDEST <= version <= versions.NEWEST


@pytest.mark.parametrize("text", ["1.28", "1.38", "2.0", "1", "latest", "", "1.3O"])
def test_no_versions(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no version|is not supported"):
        versions.parse_version(text)


ANYTHING: list[Any] = [
    None,
    1,
    "x",
    [],
    [1],
    {},
    {"a": None},
    [[]],
    [{"name": 1}],
    True,
]


@pytest.mark.parametrize("kind", ["Job", "Pod", "CronJob", "ConfigMap", "x", None])
@pytest.mark.parametrize("value", ANYTHING, ids=repr)
def test_whatever_the_types_are_nothing_is_raised(kind: Any, value: Any) -> None:
    base = by_kind("Job")
    for manifest in (
        {"kind": kind, "metadata": value, "spec": value, "data": value},
        {**base, "kind": kind, "spec": {**base["spec"], "template": {"spec": value},
                                        "podFailurePolicy": {"rules": value}}},
        {**base, "kind": kind, "spec": {"template": {"spec": {
            "containers": value, "volumes": value, "tolerations": value,
            "securityContext": value, "affinity": {"nodeAffinity": value}}}}},
        {**base, "kind": kind, "spec": {"template": {"spec": {"containers": [
            dict.fromkeys(("env", "ports", "resources", "volumeMounts", "image",
                           "securityContext", "name"), value)]}}}},
    ):  # fmt: skip
        assert len(lint([manifest], (1, 29))) == 1


def test_objects_are_read_with_their_places() -> None:
    text = (
        "kind: A\n---\n# none\n---\nkind: List\nitems:\n"
        "- kind: B\n  spec: {a: [1, 2]}\n"
    )
    one, other = read(text)
    assert (one.kind, other.kind) == ("A", "B")
    assert other.place("spec.a[1]") == (8, 17)
    assert other.place("spec.a[9].b") == (8, 13)
    assert other.place("nothing") == (7, 3)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "there is no object"),
        ("a: b\nc: [", 2, "it is no YAML"),
        ("kind: A\n---\n- x\n", 3, "expected an object"),
        ("a: 1\na: 2\n", 2, "the key a is there twice"),
        ("? [a]\n: b\n", 1, "expected a plain key"),
        ("a: !!python/object:os.system x\n", 1, "it is no YAML"),
        ("a: &x [" + "*x, " * 2 + "]\n", 1, "too large, or nested"),
        ("[" * 400 + "]" * 400, 1, "nested too deeply"),
    ],
)
def test_what_cannot_be_read(text: str, line: int, said: str) -> None:
    with pytest.raises(Unreadable, match=said) as caught:
        read(text)
    assert caught.value.line == line


IN_JOB_SET = "spec.replicatedJobs[0].template.spec"
IN_RUNTIME = f"spec.template.{IN_JOB_SET}"


@pytest.mark.parametrize(
    ("mode", "kind", "pod_path", "job_path"),
    [
        ("jobset", "JobSet", f"{IN_JOB_SET}.template.spec", IN_JOB_SET),
        ("trainjob", "TrainingRuntime", f"{IN_RUNTIME}.template.spec", IN_RUNTIME),
        ("mpijob", "MPIJob", "spec.mpiReplicaSpecs.Launcher.template.spec", None),
    ],
)
def test_the_pods_of_operators_are_looked_at(
    mode: str, kind: str, pod_path: str, job_path: str | None
) -> None:
    made = manifests(jobs.submission(f"kubernetes: {{image: x, mode: {mode}}}"))
    assert not any(lint(made))
    (owner,) = [each for each in made if each["kind"] == kind]
    if job_path is None:
        template = owner["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    else:
        spec = owner["spec"]["template"]["spec"] if kind != "JobSet" else owner["spec"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        template = job["template"]
        job["podReplacementPolicy"] = "Never"
    template["spec"]["securityContext"]["runAsNonRoot"] = False
    template["spec"]["containers"][0]["volumeMounts"].pop()
    template["metadata"]["labels"]["a b"] = "c"
    found = [each.path for findings in lint(made) for each in findings]
    wanted = {
        f"{pod_path}.containers[0].securityContext.runAsNonRoot",
        f"{pod_path}.volumes[3]",
        f"{pod_path.removesuffix('.spec')}.metadata.labels.a b",
    }
    if job_path is not None:
        wanted |= {f"{job_path}.podReplacementPolicy"}
    assert set(found) == wanted
