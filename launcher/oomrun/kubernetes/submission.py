"""What a job is on a cluster before it is objects: the spec and the files with it.

Covers: the names and labels of its objects, and how large its ConfigMap is. Does not
cover: reading the files, the objects themselves (``manifests``, ``pod``).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from oomrun.core.kubernetes_spec import JOB_FILE, KubernetesSpec
from oomrun.core.spec import JobSpec

__all__ = [
    "CONFIG_LIMIT_BYTES",
    "CONTAINER",
    "CONTAINERS",
    "KINDS",
    "MEETING_PORT",
    "OWN_LABELS",
    "GpuNeed",
    "Shipped",
    "Submission",
]  # fmt: skip

#: What the API server takes of a ConfigMap's values.
CONFIG_LIMIT_BYTES = 2**20
#: The name of a pod's one container; Kubeflow's trainer wants another.
CONTAINER = "worker"
CONTAINERS = (CONTAINER, "node")
#: The port of the metrics in a pod, where the job file names none.
METRICS_PORT = 9464

_LEAST_GRACE_S, _GRACE_MARGIN_S = 120, 30
#: Where the supervisor of several pods listens.
MEETING_PORT = 18999

#: What a job is in each mode.
KINDS = {
    "job": "Job",
    "jobset": "JobSet",
    "mpijob": "MPIJob",
    "trainjob": "TrainJob",
}

_INSTANCE = "app.kubernetes.io/instance"
_MANAGED_BY = "app.kubernetes.io/managed-by"
#: By which whatever belongs to a job is found.
OWN_LABELS = (_INSTANCE, _MANAGED_BY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A file that goes along with the job; ``path`` is below the job file's folder."""

    path: str
    content: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """Bytes that a GPU must have for one sample, and for the whole batch at a time."""

    least_bytes: int
    whole_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job with all that its manifests are made of.

    Attributes:
        spec: with a section ``kubernetes``.
        section: that section.
        job_text: the job file as it is, with its variables not filled in.
        files: the script and what it needs beside it.
        overrides: as given to ``--set``; the pod applies them to the same file.
        gpu_need: what is known of the memory that the job needs.
        checkpoint_s: what the slowest checkpoint of a run took, at most.
        version: of oomrun.
    """

    spec: JobSpec
    section: KubernetesSpec
    job_text: bytes
    files: tuple[Shipped, ...] = ()
    overrides: tuple[str, ...] = ()
    gpu_need: GpuNeed | None = None
    checkpoint_s: float | None = None
    version: str

    @property
    def name(self) -> str:
        """What the objects are called."""
        return self.spec.name

    @property
    def kind(self) -> str:
        """Of the object that starts the pods."""
        return KINDS[self.section.mode]

    @property
    def all_files(self) -> tuple[Shipped, ...]:
        """Everything that goes along, the job file first."""
        return (Shipped(path=JOB_FILE, content=self.job_text), *self.files)

    @property
    def size_bytes(self) -> int:
        """What of ``CONFIG_LIMIT_BYTES`` the files take."""
        return sum(len(file.content) for file in self.all_files)

    @property
    def digest(self) -> str:
        """Another one for other files: a ConfigMap is never changed."""
        found = hashlib.sha256()
        for file in self.all_files:
            found.update(f"{file.path}\0{len(file.content)}\0".encode())
            found.update(file.content)
        return found.hexdigest()

    @property
    def config_name(self) -> str:
        """The ConfigMap's name."""
        return f"{self.name}-{self.digest[:10]}"

    @property
    def metrics_port(self) -> int | None:
        """Where Prometheus finds the metrics; None where there are none."""
        listen = self.spec.metrics.listen
        if listen is None:
            return None
        return listen.port or METRICS_PORT

    @property
    def grace_s(self) -> int:
        """How long a pod that has to go may take."""
        if self.section.grace_s != "auto":
            return self.section.grace_s
        measured = 2 * (self.checkpoint_s or 0.0) + _GRACE_MARGIN_S
        return max(_LEAST_GRACE_S, math.ceil(measured))

    @property
    def selector(self) -> dict[str, str]:
        """The labels by which the job's pods are found."""
        return {_INSTANCE: self.name, _MANAGED_BY: "oomrun"}

    @property
    def first_pod(self) -> dict[str, str]:
        """More labels by which that one of several pods is found that has the run."""
        if self.section.pods == 1:
            return {}
        if self.section.mode == "mpijob":
            return {"training.kubeflow.org/job-role": "launcher"}
        return {"batch.kubernetes.io/job-completion-index": "0"}

    @property
    def meeting(self) -> str:
        """Where pod 0 of several is found by the others."""
        host = {
            "job": f"{self.name}-0",
            "jobset": f"{self.name}-worker-0-0",
            "mpijob": f"{self.name}-launcher",
            "trainjob": f"{self.name}-node-0-0",
        }[self.section.mode]
        return f"{host}.{self.name}:{MEETING_PORT}"

    @property
    def container(self) -> str:
        """The name of the one container of a pod."""
        return "node" if self.section.mode == "trainjob" else CONTAINER

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every object."""
        own = {
            "app.kubernetes.io/name": "oomrun",
            # A local version has a + in it, which no label may have.
            "app.kubernetes.io/version": self.version.replace("+", "-"),
            **self.selector,
        }
        return {**dict(self.section.labels), **own}
