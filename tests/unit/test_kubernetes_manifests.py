"""A job's objects: what is in them, for every version, and as YAML."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kubernetes_jobs as jobs
from oomrun.core import jobfile
from oomrun.core.errors import SpecError
from oomrun.core.events import StateMeasured
from oomrun.core.kubernetes_spec import Mode
from oomrun.core.measured_plan import plan_elsewhere
from oomrun.core.topology import Host
from oomrun.kubernetes import pod, quantities, versions, writing
from oomrun.kubernetes.gpu_memory import gpu_need
from oomrun.kubernetes.lint import lint
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.submission import GpuNeed, Shipped, Submission
from oomrun.stops import STOPPED_EXIT_CODE

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*/job.yaml"))
SECTIONS = {
    "least": "kubernetes: {image: x}",
    "full": jobs.FULL,
    "claim": "kubernetes: {image: x, volume: {claim: runs}}",
    "cpu": "kubernetes: {image: x, gpus: 0}",
}
MODES = ("job", "jobset", "mpijob", "trainjob")
SHARED = "volume: {size: 1GiB, access: ReadWriteMany}"
SEVERAL = f"kubernetes: {{image: x, pods: 3, gpus: 2, {SHARED}}}"
NEED = GpuNeed(least_bytes=3 * 2**30 + 1, whole_bytes=20 * 2**30)


def config(path: Path, mode: str) -> Submission:
    """A job of ours, sent to a cluster."""
    section = f"{{image: x, volume: {{size: 1GiB}}, mode: {mode}}}"
    text = f"{path.read_text()}kubernetes: {section}\n"
    spec = jobfile.load(text, filename=str(path), environment={})
    assert spec.kubernetes is not None
    return Submission(
        spec=spec, section=spec.kubernetes, job_text=text.encode(), version="1"
    )


def valid(made: list[dict[str, Any]], version: str) -> None:
    for manifest in made:
        jobs.check_whole(manifest, version)


def in_mode(section: str, mode: str) -> str:
    """The section in another mode, however it is written."""
    return section.replace("image: x", f"image: x, mode: {mode}").replace(
        "  image:", f"  mode: {mode}\n  image:"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", jobs.VERSIONS)
def test_every_job_is_valid_in_every_version(version: str, mode: str) -> None:
    parts = version.split(".")
    every = [
        jobs.submission(in_mode(section, mode), need=NEED)
        for section in SECTIONS.values()
    ]
    several = in_mode(SEVERAL, mode)
    every += [config(path, mode) for path in CONFIGS]
    every.append(jobs.submission(several, more="strategy: horovod"))
    assert {each.section.mode for each in every} == {mode}
    for made in map(manifests, every):
        valid(made, version)
        assert not any(lint(made, (int(parts[0]), int(parts[1]))))


def test_every_job_mode_and_version_is_among_them() -> None:
    """Of the test above: what is added later is in it, too."""
    root = Path(__file__).parents[2] / "configs"
    assert sorted(root.rglob("*.y*ml")) == CONFIGS
    assert get_args(Mode) == MODES
    known = [versions.parse_version(version) for version in jobs.VERSIONS]
    minors = range(versions.OLDEST[1], versions.NEWEST[1] + 1)
    assert known == [(1, minor) for minor in minors]


def test_the_schema_check_can_fail() -> None:
    made = manifests(jobs.submission())
    made[-1]["spec"]["completions"] = "1"
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(made, "1.34")


def test_the_least_section() -> None:
    made = jobs.rendered()
    assert set(made) == {"ServiceAccount", "ConfigMap", "NetworkPolicy", "Job"}
    assert made["ServiceAccount"]["automountServiceAccountToken"] is False
    assert all("namespace" not in each["metadata"] for each in made.values())
    found = jobs.pod_of(made)
    assert found["automountServiceAccountToken"] is False
    assert found["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert "affinity" not in found
    resources = jobs.container_of(made)["resources"]
    assert resources["requests"] == resources["limits"]  # Guaranteed
    assert resources["limits"] == {
        "cpu": "4",
        "memory": "16Gi",
        "ephemeral-storage": "10Gi",
        "nvidia.com/gpu": "1",
    }


def test_every_key_of_the_section_shows() -> None:
    made = jobs.rendered(jobs.FULL)
    assert "ServiceAccount" not in made  # there is one already
    assert all(each["metadata"]["namespace"] == "team-a" for each in made.values())
    assert all(each["metadata"]["labels"]["team"] == "vision" for each in made.values())
    assert made["PersistentVolumeClaim"]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "100Gi"}},
        "storageClassName": "fast",
    }
    assert made["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    job = made["Job"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["backoffLimitPerIndex"] == 10
    assert job["spec"]["activeDeadlineSeconds"] == 3 * 86_400
    assert job["spec"]["ttlSecondsAfterFinished"] == 3600
    assert job["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    found = jobs.pod_of(made)
    assert found["serviceAccountName"] == "trainer"
    assert found["securityContext"]["runAsUser"] == 1000
    assert found["priorityClassName"] == "low"
    assert found["imagePullSecrets"] == [{"name": "registry"}]
    assert found["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
    assert found["terminationGracePeriodSeconds"] == 600
    assert found["tolerations"][1:] == [
        {
            "key": "dedicated",
            "operator": "Equal",
            "value": "training",
            "effect": "NoSchedule",
        },
        {"key": "spot", "operator": "Exists"},
    ]
    container = jobs.container_of(made)
    assert container["image"] == "registry.local:5000/team/train:1"
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    limits = container["resources"]["limits"]
    assert limits["cpu"] == "500m"
    assert limits["nvidia.com/mig-3g.40gb"] == "1"
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert mounts["/data"]["readOnly"] is True
    assert "/workspace" in mounts
    volumes = {each["name"]: each for each in found["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes["workspace"]["persistentVolumeClaim"] == {"claimName": "digits"}
    assert container["command"][container["command"].index("--grace") + 1] == "590s"


def test_which_ends_of_a_pod_are_tried_again() -> None:
    """1, 2 and 3 are oomrun's last word; 75 and a preemption cost no retry."""
    spec = jobs.rendered()["Job"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert by_code == {STOPPED_EXIT_CODE: "Ignore", 1: "FailJob", 2: "FailJob",
                       3: "FailJob"}  # fmt: skip
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_labels_are_labels_and_those_of_oomrun_stay() -> None:
    local = replace(jobs.submission(), version="0.1.0+abc")
    assert local.labels["app.kubernetes.io/version"] == "0.1.0-abc"
    with pytest.raises(SpecError, match=r"managed-by.*oomrun sets it"):
        jobs.submission(
            "kubernetes: {image: x, pod_monitor: {app.kubernetes.io/managed-by: x}}"
        )
    made = jobs.rendered("kubernetes: {image: x, pod_monitor: {a: b}}")["PodMonitor"]
    assert made["metadata"]["labels"] == {"a": "b", **jobs.submission().labels}


def test_a_user_s_annotation_wins_over_that_for_scrapes() -> None:
    section = 'kubernetes: {image: x, annotations: {prometheus.io/scrape: "false"}}'
    template = jobs.rendered(section)["Job"]["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "false"


def test_metrics_can_be_left_out() -> None:
    made = jobs.rendered(jobs.FULL, more="metrics: {listen: none}")
    assert "PodMonitor" not in made
    assert "ports" not in jobs.container_of(made)
    assert made["NetworkPolicy"]["spec"]["ingress"] == []
    command = jobs.container_of(made)["command"]
    assert not any("metrics.listen" in word for word in command)
    ported = jobs.rendered(more="metrics: {listen: '127.0.0.1:8001'}")
    assert jobs.container_of(ported)["ports"][0]["containerPort"] == 8001


def test_metrics_over_tls_are_asked_for_so() -> None:
    tls = "metrics: {tls: {certificate: a.pem, key: b.pem}}"
    for more, scheme in (("", None), (tls, "https")):
        made = jobs.rendered(jobs.FULL, more=more)
        (endpoint,) = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
        assert endpoint.get("scheme") == scheme
        template = made["Job"]["spec"]["template"]
        assert template["metadata"]["annotations"].get("prometheus.io/scheme") == scheme


def test_what_the_kubelet_fills_in_stays_as_it_was() -> None:
    overrides = ("args=[$(HOME), $$x, $]",)
    command = jobs.container_of(jobs.rendered(overrides=overrides))["command"]
    assert "args=[$$(HOME), $$$$x, $$]" in command


def test_files_go_along_byte_by_byte() -> None:
    binary = Shipped(path="a/b.bin", content=b"\xff\x00")
    program = Shipped(path="go.sh", content=b"#!/bin/sh\n", executable=True)
    made = jobs.rendered(files=(jobs.SCRIPT, binary, program))
    config = made["ConfigMap"]
    assert config["data"]["1-train.py"] == jobs.SCRIPT.content.decode()
    assert config["binaryData"] == {"2-b.bin": "/wA="}
    assert config["immutable"] is True
    items = jobs.pod_of(made)["volumes"][0]["configMap"]["items"]
    assert [(each["path"], each["mode"]) for each in items] == [
        ("job.yaml", 0o444), ("train.py", 0o444), ("a/b.bin", 0o444), ("go.sh", 0o555)
    ]  # fmt: skip


def test_another_script_is_another_config_map() -> None:
    one = jobs.submission()
    other = jobs.submission(files=(Shipped(path="train.py", content=b"pass\n"),))
    moved = jobs.submission(
        files=(Shipped(path="train2.py", content=b"print('hi')\n"),)
    )
    assert len({one.config_name, other.config_name, moved.config_name}) == 3
    assert one.config_name == jobs.submission().config_name


def selected(section: str, need: GpuNeed | None) -> Any:
    affinity = jobs.pod_of(jobs.rendered(section, need=need)).get("affinity")
    return affinity and affinity["nodeAffinity"]


def test_a_gpu_that_is_large_enough_is_asked_for() -> None:
    found = selected("kubernetes: {image: x}", NEED)
    (term,) = found["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["3072"]}
    ]
    (preferred,) = found["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchExpressions"][0]["values"] == ["20479"]
    assert selected("kubernetes: {image: x, gpu_memory: any}", NEED) is None
    given = selected("kubernetes: {image: x, gpu_memory: 1GiB}", NEED)
    assert "preferredDuringSchedulingIgnoredDuringExecution" not in given
    assert selected("kubernetes: {image: x, gpus: 0}", NEED) is None


def test_the_need_is_the_smallest_gpu_that_the_planner_plans_for() -> None:
    seen = StateMeasured(
        at=0.0, attempt=1, fit=1, global_batch_size=64, trained_bytes=10**8,
        fixed_bytes=0, optimizer_bytes=2 * 10**8, metrics_bytes=100,
        input_bytes=10**6, graph_sizes=(1, 64), graph_peaks=(5 * 10**8, 4 * 10**9),
    )  # fmt: skip
    spec = jobs.submission().spec
    need = gpu_need(spec, seen)
    assert need is not None
    assert need.whole_bytes is not None
    assert need.least_bytes < need.whole_bytes
    host = Host(memory_total_bytes=0, memory_available_bytes=0)
    at = plan_elsewhere(spec, host, need.whole_bytes, seen).devices[0]
    below = plan_elsewhere(spec, host, need.whole_bytes - 2**20, seen).devices[0]
    assert at.micro_batch_size == 64
    assert below.micro_batch_size is not None
    assert below.micro_batch_size < 64
    assert gpu_need(spec, replace(seen, graph_sizes=(), graph_peaks=())) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("500m", 0.5), ("32Gi", 32 * 2**30), ("1e3", 1000), ("1.5k", 1500),
     ("2E", 2 * 10**18), ("0", 0)],
)  # fmt: skip
def test_quantities(text: str, number: float) -> None:
    assert quantities.parse(text) == number


@pytest.mark.parametrize(
    ("text", "hint"),
    [("8Gib", "did you mean 8Gi?"), ("8GB", "did you mean 8G?"), ("", ""),
     ("8 Gi", ""), ("five", ""), ("8K", "did you mean 8k?")],
)  # fmt: skip
def test_no_quantities(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match="^" + hint.replace("?", r"\?") + "$"):
        quantities.parse(text)


def filled_in(text: str) -> str:
    """What the kubelet makes of a word where no variable is known."""
    return text.replace("$$", "$")


@given(st.text(st.sampled_from("$()AB{}"), max_size=12))
def test_literal_is_undone_by_the_kubelet(text: str) -> None:
    assert filled_in(pod.literal(text)) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(min_size=1, max_size=10), inner, max_size=3)
    ),
    max_leaves=8,
)
TRAPS = st.sampled_from(
    ["y", "N", "on", "1e3", "0o7", "012", "1_0", "~", "null", "=", "1:30", "a: b",
     "- a", "#x", " x", "x ", "a\n b\n", "\ta\n", "a\r\nb", "\x85", "\u2028", "é",
     "\x07", "2026-01-01", ".inf", "&a", "*a", "!x", "%x", "@x", "`x", "{",
     "---", "..."]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=9) | TRAPS, values | TRAPS))
def test_yaml_says_what_the_object_says(manifest: dict[str, Any]) -> None:
    text = writing.document(manifest)
    assert yaml.safe_load(text) == manifest
    # And two of them stay two.
    assert list(yaml.safe_load_all(writing.documents([manifest, manifest]))) == [
        manifest, manifest,
    ]  # fmt: skip


@given(TRAPS)
def test_text_that_others_take_for_something_else_is_in_quotes(text: str) -> None:
    line = writing.document({"a": text})
    assert line.startswith('a: "') or line.startswith("a: |")
    assert json.loads(json.dumps({"a": text})) == yaml.safe_load(line)
