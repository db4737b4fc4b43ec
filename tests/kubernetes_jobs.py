"""Jobs on Kubernetes for the tests: as files, and as what is made of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
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
