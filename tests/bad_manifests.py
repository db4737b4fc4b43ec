"""What the lint is for: a good set of objects, and a bad example for each rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import kubernetes_jobs as jobs
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.versions import Version
from oomrun.kubernetes.watcher import watcher_objects

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]
SUBMISSION = jobs.submission(jobs.FULL)
GOOD = [*manifests(SUBMISSION), *watcher_objects(SUBMISSION)]


def by_kind(kind: str) -> Manifest:
    """The first object of the kind, to be changed."""
    return copy.deepcopy(next(each for each in GOOD if each["kind"] == kind))


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
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NODE_TERM = f"{IN_POD}.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0]"


def node_term(job: Manifest) -> Manifest:
    found: Manifest = pod(job)["affinity"]["nodeAffinity"][REQUIRED][
        "nodeSelectorTerms"
    ][0]
    return found


class Bad(NamedTuple):
    """One change, and what is said of it at which path."""

    name: str
    change: Change
    path: str
    said: str
    kind: str = "Job"
    version: Version | None = None


BAD_JOBS: list[tuple[str, Change, str, str]] = [
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
    # further words, numbers and places
    ("dnsPolicy", lambda j: pod(j).update(dnsPolicy="Host"),
     f"{IN_POD}.dnsPolicy", "expected ClusterFirst"),
    ("preemptionPolicy", lambda j: pod(j).update(preemptionPolicy="No"),
     f"{IN_POD}.preemptionPolicy", "expected PreemptLowerPriority or Never"),
    ("terminationMessagePolicy",
     lambda j: container(j).update(terminationMessagePolicy="Logs"),
     f"{IN_CONTAINER}.terminationMessagePolicy", "expected File or Fallback"),
    ("fsGroupChangePolicy",
     lambda j: pod(j)["securityContext"].update(fsGroupChangePolicy="Never"),
     f"{IN_POD}.securityContext.fsGroupChangePolicy", "expected OnRootMismatch"),
    ("protocol", lambda j: container(j)["ports"][0].update(protocol="tcp"),
     f"{IN_CONTAINER}.ports[0].protocol", "expected TCP or UDP or SCTP"),
    ("toleration operator", lambda j: pod(j)["tolerations"][0].update(operator="Is"),
     f"{IN_POD}.tolerations[0].operator", "expected Exists or Equal"),
    ("toleration value", lambda j: pod(j)["tolerations"][0].update(value="x"),
     f"{IN_POD}.tolerations[0].value", "Exists takes no value"),
    ("node operator",
     lambda j: node_term(j)["matchExpressions"][0].update(operator="gt"),
     f"{NODE_TERM}.matchExpressions[0].operator", "expected In or NotIn"),
    ("no kind", lambda j: j.pop("kind"), "kind", "expected the kind"),
    ("image", lambda j: container(j).update(image="a b"),
     f"{IN_CONTAINER}.image", "expected an image"),
    ("container's name", lambda j: container(j).update(name="Worker"),
     f"{IN_CONTAINER}.name", "expected a name such as worker"),
    ("two containers", lambda j: pod(j)["containers"].append(container(j)),
     f"{IN_POD}.containers[1].name", "there are two containers worker"),
    ("no container", lambda j: pod(j)["containers"].clear(),
     f"{IN_POD}.containers", "expected a container"),
    ("volume's name", lambda j: pod(j)["volumes"][3].update(name="s h m"),
     f"{IN_POD}.volumes[3].name", "expected a name such as data"),
    ("two volumes", lambda j: pod(j)["volumes"][3].update(name="tmp"),
     f"{IN_POD}.volumes[3].name", "there are two volumes tmp"),
    ("two sources", lambda j: pod(j)["volumes"][3].update(secret={}),
     f"{IN_POD}.volumes[3]", "one source such as emptyDir"),
    ("absolute path in a volume",
     lambda j: pod(j)["volumes"][0]["configMap"]["items"][1].update(path="/x"),
     f"{IN_POD}.volumes[0].configMap.items[1].path", "expected a relative path"),
    ("mode of a file",
     lambda j: pod(j)["volumes"][0]["configMap"]["items"][1].update(mode=1024),
     f"{IN_POD}.volumes[0].configMap.items[1].mode", "expected 0 to 0777"),
    ("relative mount", lambda j: container(j)["volumeMounts"][3].update(mountPath="x"),
     f"{IN_CONTAINER}.volumeMounts[3].mountPath", "expected an absolute path"),
    ("less than nothing",
     lambda j: container(j)["resources"]["limits"].update(memory="-1Gi"),
     f"{IN_CONTAINER}.resources.limits.memory", "expected 0 or more"),
    ("two sources of a variable",
     lambda j: container(j)["env"][0].update(value="a", valueFrom={}),
     f"{IN_CONTAINER}.env[0]", "exclude each other"),
    ("port", lambda j: container(j)["ports"][0].update(containerPort=70_000),
     f"{IN_CONTAINER}.ports[0].containerPort", "expected 1 to 65535"),
    ("grace", lambda j: pod(j).update(terminationGracePeriodSeconds=-1),
     f"{IN_POD}.terminationGracePeriodSeconds", "expected 0 or more"),
    ("ttl", lambda j: j["spec"].update(ttlSecondsAfterFinished=-1),
     "spec.ttlSecondsAfterFinished", "expected 0 or more"),
    ("annotation's key", lambda j: j["metadata"]["annotations"].update({"a b": "c"}),
     "metadata.annotations.a b", "expected an annotation's key"),
    ("long annotations",
     lambda j: j["metadata"]["annotations"].update(a="x" * 2**18),
     "metadata.annotations", "more than 256 KiB"),
    ("selector", lambda j: j["spec"].update(selector={"matchLabels": {"a": "b"}}),
     "spec.selector", "needs manualSelector: true"),
    ("successPolicy alone",
     lambda j: j["spec"].update(completionMode="NonIndexed", successPolicy={}),
     "spec.successPolicy", "needs completionMode: Indexed"),
    ("FailIndex alone",
     lambda j: (rule(j, 2).update(action="FailIndex"),
                j["spec"].pop("backoffLimitPerIndex")),
     f"{POLICY}.rules[2].action", "FailIndex needs backoffLimitPerIndex"),
    ("no exit codes", lambda j: rule(j, 2)["onExitCodes"].update(values=[]),
     f"{POLICY}.rules[2].onExitCodes.values", "expected 1 to 255 exit codes"),
    # more of the restricted profile
    ("privileged",
     lambda j: container(j)["securityContext"].update(privileged=True),
     f"{IN_CONTAINER}.securityContext.privileged", "does not let it in"),
    ("added capability",
     lambda j: container(j)["securityContext"]["capabilities"].update(add=["NET_RAW"]),
     f"{IN_CONTAINER}.securityContext.capabilities.add", "lets no NET_RAW in"),
    ("no seccomp", lambda j: pod(j)["securityContext"].pop("seccompProfile"),
     f"{IN_CONTAINER}.securityContext.seccompProfile", "wants RuntimeDefault"),
]  # fmt: skip

#: All of them, those of other kinds and those of a version with them.
BAD = [
    *(Bad(*each) for each in BAD_JOBS),
    Bad("large ConfigMap", lambda c: c["data"].update(x="\u00e9" * (2**19 + 1)),
        "data", "it holds", "ConfigMap"),
    Bad("key of a ConfigMap", lambda c: c["data"].update({"a/b": ""}),
        "data.a/b", "expected letters, digits", "ConfigMap"),
    Bad("key twice", lambda c: c.update(binaryData={"job.yaml": ""}),
        "binaryData.job.yaml", "it is in data, too", "ConfigMap"),
    Bad("accessMode", lambda c: c["spec"].update(accessModes=["RWX"]),
        "spec.accessModes[0]", "expected ReadWriteOnce", "PersistentVolumeClaim"),
    Bad("policyType", lambda p: p["spec"].update(policyTypes=["In"]),
        "spec.policyTypes[0]", "expected Ingress or Egress", "NetworkPolicy"),
    Bad("account without namespace", lambda b: b["subjects"][0].pop("namespace"),
        "subjects[0].namespace", "needs its namespace", "RoleBinding"),
    Bad("two of one name", lambda c: c["metadata"].update(name="digits-watch"),
        "metadata.name", "there are two PersistentVolumeClaim digits-watch",
        "PersistentVolumeClaim"),
    Bad("field of a later version", lambda j: j["spec"].update(successPolicy={}),
        "spec.successPolicy", "", "Job", (1, 29)),
]  # fmt: skip
