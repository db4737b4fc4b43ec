"""Jobs on Kubernetes for the tests: as files, and as what is made of them."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate import utils as schema_reader

from oomrun.core import jobfile
from oomrun.kubernetes.manifests import manifests
from oomrun.kubernetes.submission import GpuNeed, Shipped, Submission

FRAME = "name: digits\nscript: train.py\n"
SCRIPT = Shipped(path="train.py", content=b"print('hi')\n")
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]

#: A section that has every key.
FULL = """\
kubernetes:
  image: registry.local:5000/team/train:1
  namespace: team-a
  gpus: 1
  gpu_resource: nvidia.com/mig-3g.40gb
  gpu_memory: 24GiB
  cpu: 500m
  memory: 32Gi
  shm: 2GiB
  storage: 50GiB
  volume: {size: 100GiB, storage_class: fast, access: ReadWriteMany}
  mounts: {/data: datasets}
  files: [model.py]
  secrets: [wandb]
  pull_secrets: [registry]
  service_account: trainer
  user: 1000
  queue: training
  priority_class: low
  node_selector: {nvidia.com/gpu.product: H100}
  tolerations: [dedicated=training:NoSchedule, spot]
  labels: {team: vision}
  annotations: {sidecar.istio.io/inject: "false"}
  retries: 10
  grace: 10min
  deadline: 3d
  ttl: 1h
  pod_monitor: {release: prometheus}
"""


def check_schema(manifest: dict[str, Any], version: str) -> None:
    """Raises ValidationError unless the object is strictly what the version has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema_reader, "schema_contents", _schema_contents)
        kubernetes_validate.validate(manifest, version, strict=True)


@functools.lru_cache(maxsize=1)
def mpi_job_schema() -> dict[str, Any]:
    """What an MPIJob may say; the schema names its source."""
    path = Path(__file__).parent / "data/mpijob-v2beta1.schema.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check_whole(manifest: dict[str, Any], version: str) -> None:
    """As ``check_schema``, also for kinds that are not of Kubernetes itself.

    Of these their own models or a schema of ours know the fields, and the schemas of
    Kubernetes those of the Jobs and the pods in them.
    """
    kind = manifest["kind"]
    model = _MODELS.get(kind)
    if model is not None:
        module = importlib.import_module(f"kubeflow_trainer_api.models.{model[0]}")
        read = getattr(module, model[1]).from_dict(manifest)
        assert read.to_dict() == manifest, f"{kind}: a field is not known"
    if kind == "MPIJob":
        found = best_match(Draft202012Validator(mpi_job_schema()).iter_errors(manifest))
        assert found is None, f"MPIJob: {found.json_path}: {found.message}"
    for inner in _inside(manifest):
        check_schema(inner, version)


_MODELS = {
    "JobSet": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    "TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": (
        "trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime",
    ),
}  # fmt: skip


def _inside(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What of the object the schemas of Kubernetes know."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "PodMonitor" | "TrainJob":
            return []
        case "JobSet":
            return [_as_job(each) for each in spec["replicatedJobs"]]
        case "TrainingRuntime":
            return [
                _as_job(each) for each in spec["template"]["spec"]["replicatedJobs"]
            ]
        case "MPIJob":
            return [
                {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": "x"},
                    "template": each["template"],
                }
                for each in spec["mpiReplicaSpecs"].values()
            ]
    return [manifest]


def _as_job(replicated: dict[str, Any]) -> dict[str, Any]:
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    return {**whole, "spec": replicated["template"]["spec"]}


# The package reads megabytes of JSON for every object.
_schema_contents = functools.lru_cache(maxsize=12)(schema_reader.schema_contents)


def submission(
    section: str = "kubernetes: {image: x}",
    *,
    more: str = "",
    files: tuple[Shipped, ...] = (SCRIPT,),
    overrides: tuple[str, ...] = (),
    need: GpuNeed | None = None,
) -> Submission:
    """The job with such a section."""
    text = f"{FRAME}{section}\n{more}\n"
    spec = jobfile.load(text, filename="job.yaml", environment={})
    assert spec.kubernetes is not None
    return Submission(
        spec=spec,
        section=spec.kubernetes,
        job_text=text.encode(),
        files=files,
        overrides=overrides,
        gpu_need=need,
        version="0.1.0",
    )


def rendered(section: str = "kubernetes: {image: x}", **kwargs: Any) -> dict[str, Any]:
    """The job's objects by their kinds."""
    made = manifests(submission(section, **kwargs))
    return {manifest["kind"]: manifest for manifest in made}


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    """The ``spec`` of the Job's pods."""
    pod: dict[str, Any] = made["Job"]["spec"]["template"]["spec"]
    return pod


def container_of(made: dict[str, Any]) -> dict[str, Any]:
    """The one container of the Job's pods."""
    (container,) = pod_of(made)["containers"]
    return dict(container)


def write_job(folder: Path, section: str, frame: str = FRAME) -> Path:
    """The job as a file with its script beside it."""
    (folder / "train.py").write_bytes(SCRIPT.content)
    path = folder / "job.yaml"
    path.write_text(f"{frame}{section}\n")
    return path
