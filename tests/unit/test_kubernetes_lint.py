"""The lint finds what it is for: one bad example each, and nothing in good ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import kubernetes_jobs as jobs
from oomrun.kubernetes import versions
from oomrun.kubernetes.lint import lint
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.reading import Unreadable, read

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]
GOOD = manifests(jobs.submission(jobs.FULL))


def by_kind(kind: str) -> Manifest:
    (found,) = [each for each in GOOD if each["kind"] == kind]
    return copy.deepcopy(found)


def pod(job: Manifest) -> Manifest:
    found: Manifest = job["spec"]["template"]["spec"]
    return found


def container(job: Manifest) -> Manifest:
    found: Manifest = pod(job)["containers"][0]
    return found


def rule(job: Manifest, index: int) -> Manifest:
    found: Manifest = job["spec"]["podFailurePolicy"]["rules"][index]
    return found


IN_POD = "spec.template.spec"
IN_CONTAINER = f"{IN_POD}.containers[0]"
POLICY = "spec.podFailurePolicy"

BAD: list[tuple[str, Change, str, str]] = [
    # words that are none of the known ones
    ("restartPolicy", lambda j: pod(j).update(restartPolicy="Bogus"),
     f"{IN_POD}.restartPolicy", "expected Never or OnFailure in a Job, got Bogus"),
    ("Always in a Job", lambda j: pod(j).update(restartPolicy="Always"),
     f"{IN_POD}.restartPolicy", "expected Never or OnFailure"),
    ("completionMode", lambda j: j["spec"].update(completionMode="indexed"),
     "spec.completionMode", "expected NonIndexed or Indexed"),
    ("podReplacementPolicy", lambda j: j["spec"].update(podReplacementPolicy="Never"),
     "spec.podReplacementPolicy", "expected Failed or TerminatingOrFailed"),
    ("imagePullPolicy", lambda j: container(j).update(imagePullPolicy="Sometimes"),
     f"{IN_CONTAINER}.imagePullPolicy", "expected Always or IfNotPresent or Never"),
    ("action", lambda j: rule(j, 0).update(action="Fail"),
     f"{POLICY}.rules[0].action", "expected FailJob or FailIndex"),
    ("exit code operator", lambda j: rule(j, 1)["onExitCodes"].update(operator="Is"),
     f"{POLICY}.rules[1].onExitCodes.operator", "expected In or NotIn"),
    ("condition status", lambda j: rule(j, 0)["onPodConditions"][0].pop("status"),
     f"{POLICY}.rules[0].onPodConditions[0].status", 'expected "True" in quotes'),
    ("toleration effect", lambda j: pod(j)["tolerations"][0].update(effect="Never"),
     f"{IN_POD}.tolerations[0].effect", "expected NoSchedule"),
    ("seccomp",
     lambda j: pod(j)["securityContext"].update(seccompProfile={"type": "x"}),
     f"{IN_POD}.securityContext.seccompProfile.type", "expected RuntimeDefault"),
    ("medium", lambda j: pod(j)["volumes"][3]["emptyDir"].update(medium="memory"),
     f"{IN_POD}.volumes[3].emptyDir.medium", "expected  or Memory"),
    # quantities and resources
    ("quantity", lambda j: container(j)["resources"]["limits"].update(memory="8Gib"),
     f"{IN_CONTAINER}.resources.limits.memory", "expected a quantity"),
    ("request over limit",
     lambda j: container(j)["resources"]["requests"].update(memory="1Ti"),
     f"{IN_CONTAINER}.resources.limits.memory", "the request of memory is larger"),
    ("GPUs unequal",
     lambda j: container(j)["resources"]["limits"].update(
         {"nvidia.com/mig-3g.40gb": "2"}),
     f"{IN_CONTAINER}.resources.requests.nvidia.com/mig-3g.40gb",
     "request and limit of nvidia.com/mig-3g.40gb must be the same"),
    ("GPU without limit",
     lambda j: container(j)["resources"]["limits"].pop("nvidia.com/mig-3g.40gb"),
     f"{IN_CONTAINER}.resources.requests.nvidia.com/mig-3g.40gb", "needs a limit"),
    ("half a GPU",
     lambda j: [container(j)["resources"][k].update({"nvidia.com/mig-3g.40gb": "500m"})
                for k in ("requests", "limits")],
     f"{IN_CONTAINER}.resources.limits.nvidia.com/mig-3g.40gb", "a whole number"),
    # names
    ("name", lambda j: j["metadata"].update(name="Digits"),
     "metadata.name", "got 'Digits'"),
    ("name with a line break", lambda j: j["metadata"].update(name="digits\n"),
     "metadata.name", "lower-case letters"),
    ("no name", lambda j: j["metadata"].pop("name"), "metadata.name", "got None"),
    ("host", lambda j: j["metadata"].update(name="a" * 62),
     "metadata.name", "a pod's host would be"),
    ("namespace", lambda j: j["metadata"].update(namespace="a.b"),
     "metadata.namespace", "expected a namespace"),
    ("label", lambda j: j["metadata"]["labels"].update(team="a b"),
     "metadata.labels.team", "expected a label's value"),
    ("label's key", lambda j: j["metadata"]["labels"].update({"/x": "y"}),
     "metadata.labels./x", "expected a label's key"),
    ("annotation", lambda j: j["metadata"]["annotations"].update(a=True),
     "metadata.annotations.a", "expected a text in quotes"),
    ("port's name",
     lambda j: container(j)["ports"][0].update(name="metrics-of-the-job"),
     f"{IN_CONTAINER}.ports[0].name", "at most 15"),
    ("variable", lambda j: container(j)["env"][0].update(name="A B"),
     f"{IN_CONTAINER}.env[0].name", "the name of a variable"),
    ("variable twice", lambda j: container(j)["env"][1].update(name="HOME"),
     f"{IN_CONTAINER}.env[1].name", "there are two variables HOME"),
    # what needs something beside it
    ("policy without Never", lambda j: pod(j).update(restartPolicy="OnFailure"),
     POLICY, "needs restartPolicy: Never"),
    ("policy without Failed",
     lambda j: j["spec"].update(podReplacementPolicy="TerminatingOrFailed"),
     "spec.podReplacementPolicy", "podFailurePolicy needs Failed"),
    ("per index without Indexed", lambda j: j["spec"].pop("completionMode"),
     "spec.backoffLimitPerIndex", "needs completionMode: Indexed"),
    ("maxFailedIndexes alone", lambda j: j["spec"].pop("backoffLimitPerIndex"),
     "spec.maxFailedIndexes", "needs backoffLimitPerIndex"),
    ("Indexed without completions", lambda j: j["spec"].pop("completions"),
     "spec.completionMode", "Indexed needs completions"),
    ("0 in exit codes",
     lambda j: rule(j, 2)["onExitCodes"].update(values=[0, 1]),
     f"{POLICY}.rules[2].onExitCodes.values", "0 is no failure"),
    ("exit codes out of order",
     lambda j: rule(j, 2)["onExitCodes"].update(values=[3, 1]),
     f"{POLICY}.rules[2].onExitCodes.values", "in ascending order"),
    ("no such container",
     lambda j: rule(j, 1)["onExitCodes"].update(containerName="main"),
     f"{POLICY}.rules[1].onExitCodes.containerName", "there is no container main"),
    ("empty rule", lambda j: rule(j, 1).pop("onExitCodes"),
     f"{POLICY}.rules[1]", "expected one of onExitCodes"),
    # volumes
    ("mount without volume", lambda j: pod(j)["volumes"].pop(3),
     f"{IN_CONTAINER}.volumeMounts[3].name", "there is no volume shm"),
    ("volume without mount", lambda j: container(j)["volumeMounts"].pop(3),
     f"{IN_POD}.volumes[3]", "no container mounts the volume shm"),
    ("two mounts at one path",
     lambda j: container(j)["volumeMounts"][3].update(mountPath="/tmp"),
     f"{IN_CONTAINER}.volumeMounts[3].mountPath", "there are two mounts /tmp"),
    ("out of the volume",
     lambda j: pod(j)["volumes"][0]["configMap"]["items"][1].update(path="../x"),
     f"{IN_POD}.volumes[0].configMap.items[1].path", "leads out of the volume"),
    ("no such key in the ConfigMap",
     lambda j: pod(j)["volumes"][0]["configMap"]["items"][1].update(key="x"),
     f"{IN_POD}.volumes[0].configMap.items[1].key", "the ConfigMap has no key x"),
    # placement
    ("Gt with text",
     lambda j: pod(j)["affinity"]["nodeAffinity"][
         "requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0][
         "matchExpressions"][0].update(values=["24GiB"]),
     f"{IN_POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
     ".nodeSelectorTerms[0].matchExpressions[0].values", "one whole number"),
    # the restricted profile
    ("root", lambda j: pod(j)["securityContext"].update(runAsUser=0),
     f"{IN_CONTAINER}.securityContext.runAsUser", "does not let root in"),
    ("may be root", lambda j: pod(j)["securityContext"].pop("runAsNonRoot"),
     f"{IN_CONTAINER}.securityContext.runAsNonRoot", "wants true"),
    ("escalation",
     lambda j: container(j)["securityContext"].pop("allowPrivilegeEscalation"),
     f"{IN_CONTAINER}.securityContext.allowPrivilegeEscalation", "wants false"),
    ("capabilities", lambda j: container(j)["securityContext"].pop("capabilities"),
     f"{IN_CONTAINER}.securityContext.capabilities.drop", "wants [ALL]"),
    ("host path",
     lambda j: pod(j)["volumes"].__setitem__(
         2, {"name": "tmp", "hostPath": {"path": "/"}}),
     f"{IN_POD}.volumes[2].hostPath", "lets no hostPath in"),
    ("host network", lambda j: pod(j).update(hostNetwork=True),
     f"{IN_POD}.hostNetwork", "does not let it in"),
]  # fmt: skip


def found_in(manifest: Manifest) -> list[tuple[str, str]]:
    others = [each for each in GOOD if each["kind"] != manifest["kind"]]
    *_, findings = lint([*others, manifest])
    return [(finding.path, finding.message) for finding in findings]


@pytest.mark.parametrize(
    ("change", "path", "said"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_a_bad_job(change: Change, path: str, said: str) -> None:
    job = by_kind("Job")
    assert found_in(job) == []
    change(job)
    assert any(at == path and said in message for at, message in found_in(job)), (
        found_in(job)
    )


def test_a_config_map_that_is_too_large() -> None:
    config = by_kind("ConfigMap")
    config["data"]["x"] = "é" * (2**19 + 1)
    assert ("data", "it holds") in [(at, m[:8]) for at, m in found_in(config)]
    config["data"]["x"] = ""
    config["data"]["a/b"] = ""
    assert [at for at, _ in found_in(config)] == ["data.a/b"]


def test_two_of_one_name() -> None:
    findings = lint([*GOOD, by_kind("ConfigMap")])[-1]
    assert [finding.path for finding in findings] == ["metadata.name"]


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
