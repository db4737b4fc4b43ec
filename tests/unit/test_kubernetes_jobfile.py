"""The section ``kubernetes``: what it means, and that nothing gets through it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

import kubernetes_jobs as jobs
from oomrun.cli.cluster_job import OfThePod
from oomrun.core import jobfile
from oomrun.core.jobfile import checks_kubernetes
from oomrun.core.kubernetes_spec import (
    Claim,
    KubernetesSpec,
    NewClaim,
    Toleration,
)
from oomrun.kubernetes import writing

FRAME = jobs.FRAME


def problems(text: str) -> list[str]:
    examined = jobfile.examine(FRAME + text, filename="job.yaml", environment={})
    return [str(problem) for problem in examined.problems]


def section(text: str) -> KubernetesSpec:
    found = jobfile.load(FRAME + text, filename="job.yaml", environment={}).kubernetes
    assert found is not None
    return found


def test_a_job_without_it() -> None:
    spec = jobfile.load(FRAME, filename="job.yaml", environment={})
    assert spec.kubernetes is None


def test_defaults_are_those_of_the_reference() -> None:
    found = section("kubernetes: {image: x}")
    assert found == KubernetesSpec(image="x")
    said = {
        "gpu_resource: nvidia.com/gpu", "gpu_memory: auto", "cpu: 4", "memory: 16GiB",
        "shm: 1GiB", "storage: 10GiB", "user: 10001", "retries: 3", "grace: auto",
        "ttl: 1d", "pods: 1", "mode: job", "files: []", "secrets: []",
        "tolerations: []",
    }  # fmt: skip
    text = "kubernetes:\n  image: x\n" + "".join(f"  {line}\n" for line in said)
    assert section(text) == found


def test_every_key() -> None:
    text = jobs.FULL.replace("nvidia.com/mig-3g.40gb", "nvidia.com/gpu.shared")
    found = section(text)
    assert found.image == "registry.local:5000/team/train:1"
    assert found.namespace == "team-a"
    assert found.gpu_resource == "nvidia.com/gpu.shared"
    assert found.gpu_memory == 24 * 2**30
    assert found.cpu_millicores == 500
    assert found.memory_bytes == 32 * 2**30
    assert found.volume == NewClaim(
        size_bytes=100 * 2**30, storage_class="fast", access="ReadWriteMany"
    )
    assert found.mounts == (("/data", "datasets"),)
    assert found.tolerations == (
        Toleration(key="dedicated", value="training", effect="NoSchedule"),
        Toleration(key="spot"),
    )
    assert found.labels == (("team", "vision"),)
    assert found.pod_monitor == (("release", "prometheus"),)
    assert (found.grace_s, found.ttl_s, found.deadline_s) == (600, 3600, 259_200)
    assert section("kubernetes: {image: x, volume: {claim: a}}").volume == Claim("a")


def test_gpus_are_one_but_where_the_devices_are_the_cpu() -> None:
    assert section("kubernetes: {image: x}").gpus == 1
    assert section("devices: cpu\nkubernetes: {image: x}").gpus == 0
    cpu = "devices: {cpu: 1, memory: 1GiB}\nkubernetes: {image: x}"
    assert section(cpu).gpus == 0


# What somebody may try to get into a manifest, and what must not even be quoted, as it
# would be of no use there.
HOSTILE = [
    "", " ", "a b", "a\nb", "x\n---\nkind: Secret", '"}', "'", "{{ x }}", "$(HOME)",
    "`id`", "../..", "/", "a/../b", "-a", "a-", "A", "ü", "a\u0000", "a\u2028b", "a:",
    "x" * 300, "@", "a,b", "*", "&x", "!x", "a=b", "a;b", "a|b",
]  # fmt: skip
NAMES = [
    "namespace", "service_account", "queue", "priority_class", "gpu_resource",
    "volume.claim", "secrets[]", "pull_secrets[]", "image", "labels{}",
    "node_selector{}", "pod_monitor{}", "mounts{}", "mounts.", "labels.", "files[]",
    "node_selector.", "annotations.", "tolerations[]", "memory", "cpu", "grace",
]  # fmt: skip
# Where a value may have some of these letters.
FINE = {
    "labels{}": {"", "A"},
    "node_selector{}": {"", "A"},
    "pod_monitor{}": {"", "A"},
    "labels.": {"A", "a"},
    "node_selector.": {"A"},
    "annotations.": {"A"},
    "tolerations[]": {"A", "a=b"},
    "files[]": {"A", "a-", "x" * 300},
    "image": {"x" * 300},
}


def document(key: str, value: str) -> dict[str, Any]:
    name = key.rstrip("[]{}.")
    found: Any = value
    if key.endswith("[]"):
        found = [value]
    elif key.endswith("{}"):
        found = {"/data" if name == "mounts" else "a": value}
    elif key.endswith("."):
        found = {value: "a"}
    elif "." in name:
        name, inner = name.split(".")
        found = {inner: value}
    return {"image": "x", name: found}


@pytest.mark.parametrize("key", NAMES)
def test_hostile_values_are_refused(key: str) -> None:
    for value in HOSTILE:
        text = f"kubernetes: {json.dumps(document(key, value))}"
        examined = jobfile.examine(FRAME + text, filename="job.yaml", environment={})
        if value in FINE.get(key, ()):
            assert not examined.problems, (key, value, examined.problems)
            continue
        assert examined.problems, (key, value)
        for problem in examined.problems:
            assert problem.line >= 1
            assert str(problem).isprintable()


def test_text_that_may_be_anything_is_quoted() -> None:
    """Annotations and overrides are the only free text, and stay what they are."""
    for value in [each for each in HOSTILE if "\u0000" not in each]:  # that is no YAML
        text = f"kubernetes: {json.dumps(document('annotations{}', value))}"
        made = jobs.rendered(text, overrides=(f"env.A={value}",))
        again = {
            each["kind"]: each
            for each in yaml.safe_load_all(writing.documents(made.values()))
        }
        assert again == made
        assert made["Job"]["metadata"]["annotations"]["a"] == value
        assert set(made) == {"ServiceAccount", "ConfigMap", "NetworkPolicy", "Job"}
        said = jobs.container_of(made)["command"]
        assert f"env.A={value}".replace("$", "$$") in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kubernetes: {}", "3:13: kubernetes: expected the key image"),
        ("kubernetes: {image: 1}", 'quote it: "1"'),
        ("kubernetes: {image: x, memory: 8}", "kubernetes.memory: expected a size"),
        ("kubernetes: {image: x, cpu: 0}", "more than nothing"),
        ("kubernetes: {image: x, user: 0}", "at least 1"),
        ("kubernetes: {image: x, grace: 20}", "add a unit: 20s or 20min"),
        ("kubernetes: {image: x, grace: 1s}", "from 30s to"),
        ("kubernetes: {image: x, labels: {team: 1}}", 'quote it: "1"'),
        ("kubernetes: {image: x, labels: {app.kubernetes.io/name: a}}", "sets it"),
        ("kubernetes: {image: x, mounts: {/workspace/a: b}}", "/workspace is taken"),
        ("kubernetes: {image: x, mounts: {/etc/ssl: b}}", "/etc is taken"),
        ("kubernetes: {image: x, files: [job.yaml]}", "the job file itself"),
        ("kubernetes: {image: x, files: [train.py]}", "goes along anyhow"),
        ("kubernetes: {image: x, volume: {}}", "one of the keys claim and size"),
        ("kubernetes: {image: x, volume: runs}", "expected a mapping such as"),
        (
            "kubernetes: {image: x, volume: {claim: a, size: 1GiB}}",
            "claim and size exclude each other",
        ),
        (
            "kubernetes: {image: x, volume: {claim: a, access: ReadWriteMany}}",
            "claim and access exclude each other",
        ),
        ("strategy: single\nkubernetes: {image: x, gpus: 2}", "trains on one GPU"),
        (
            "kubernetes: {image: x, pods: 2, volume: {claim: a}}",
            "with strategy horovod or multi_worker_mirrored",
        ),
        (
            "strategy: horovod\nkubernetes: {image: x, pods: 2}",
            "a volume that all of them can write to",
        ),
        (
            "strategy: horovod\nkubernetes: {image: x, pods: 2, volume: {size: 1GiB}}",
            "several pods cannot all write to a ReadWriteOnce volume",
        ),
        ("kubernetes: {image: x, memory_max: 2GiB}", "less than memory (16GiB)"),
        ("kubernetes: {image: x, mode: statefulset}", "jobset"),
        ("kubernetes: {image: x, shm: 16GiB}", "leaves nothing of it"),
        ("kubernetes: {image: x, memory: 1GiB}", "kubernetes.memory: shm (1GiB)"),
        ("devices: cpu\nkubernetes: {image: x, gpus: 1}", "a GPU would be idle"),
        ("devices: gpu\nkubernetes: {image: x, gpus: 0}", "so a pod needs one"),
        ("devices: [1]\nkubernetes: {image: x}", "there is no GPU 1 in a pod with 1"),
        ("devices: [GPU-8f6d]\nkubernetes: {image: x}", "a UUID names a GPU of one"),
        (
            "devices: cpu\nkubernetes: {image: x, gpu_memory: 1GiB}",
            "a pod of this job has no GPU",
        ),
        (
            "devices: {cpu: 1, memory: 20GiB}\nkubernetes: {image: x}",
            "devices.memory: a pod has 16GiB of memory in all",
        ),
    ],
)
def test_what_cannot_be(text: str, said: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert said in found[0]


def test_a_name_with_its_index_is_the_name_of_a_host() -> None:
    for length, wrong in ((61, 0), (62, 1)):
        text = f"name: {'a' * length}\nscript: t.py\nkubernetes: {{image: x}}"
        examined = jobfile.examine(text, filename="job.yaml", environment={})
        assert len(examined.problems) == wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("checkpoint: {dir: ck}", "checkpoint.dir: expected a folder below /workspace"),
        ("checkpoint: {dir: /data/ck}", "expected a folder below /workspace"),
        ("checkpoint: {dir: /workspace/ck}", ""),
        ("env: {API_KEY: abc}", "env.API_KEY: looks like a secret"),
        ("env: {WANDB_API_KEY: abc}", "env.WANDB_API_KEY: looks like a secret"),
        ("env: {DB_PASSWORD: abc}", "looks like a secret"),
        ("env: {HF_TOKEN: abc}", "looks like a secret"),
        ("env: {HF_TOKEN: '${HF_TOKEN}'}", ""),
        ("env: {PAD_TOKEN: abc, KEYS: a, SECRETARY: b}", ""),
        ("env: {A: '${A:-b}'}\nargs: ['${NOT_SET}']", ""),
    ],
)
def test_what_a_cluster_does_not_take(text: str, said: str) -> None:
    examined = jobfile.examine(
        FRAME + text, filename="job.yaml", environment=OfThePod()
    )
    assert not examined.problems
    found = checks_kubernetes.check_for_cluster(examined.values, examined.places)
    assert said in "".join(map(str, found))
    assert bool(found) == bool(said)
