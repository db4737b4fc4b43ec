"""What a job file says about running on Kubernetes, checked and typed.

Covers: the section ``kubernetes`` with its defaults. Does not cover: the manifests that
are made of it (``oomrun.kubernetes``).
"""

from dataclasses import dataclass
from typing import Literal

GPU_RESOURCE = "nvidia.com/gpu"
#: Where the volume is in a pod: the folder that oomrun is called in.
WORKSPACE = "/workspace"
#: Where the job file and the files that go with it are in a pod.
JOB_FOLDER = "/etc/oomrun"
#: The name of the job file there.
JOB_FILE = "job.yaml"
#: Labels and annotations that objects have anyway.
OWN_KEYS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/version",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "oomrun/digest",
)

_GIB = 2**30

#: What a job is on the cluster: the Job of Kubernetes itself, or an operator's kind.
Mode = Literal["job", "jobset", "mpijob", "trainjob"]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim that is there already."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewClaim:
    """A PersistentVolumeClaim to make; it outlives the job."""

    size_bytes: int
    storage_class: str | None = None
    access: AccessMode = "ReadWriteOnce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that the pods do not mind; None stands for any value or effect."""

    key: str
    value: str | None = None
    effect: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSpec:
    """How to run on a cluster.

    Attributes:
        namespace: None for the one that the client is set to.
        mode: what the job is there.
        pods: how many; each has the job's ``devices``.
        gpus: for each pod.
        gpu_resource: what the cluster calls a GPU or a MIG device.
        gpu_memory: bytes that a GPU must have at least; "auto": by what was measured.
        memory_max_bytes: what ``submit --watch`` may raise ``memory_bytes`` to.
        volume: what the run is kept on; None: with the pod it is gone.
        mounts: path and claim of further volumes, to read from.
        secrets: Secrets whose keys become environment variables.
        grace_s: for a checkpoint when a pod has to go; "auto": by those of a run here.
        user: the user and group id in the pods.
        pod_monitor: labels of a PodMonitor; None: there is none.
    """

    image: str
    namespace: str | None = None
    mode: Mode = "job"
    pods: int = 1
    gpus: int = 1
    gpu_resource: str = GPU_RESOURCE
    gpu_memory: int | Literal["auto", "any"] = "auto"
    cpu_millicores: int = 4000
    memory_bytes: int = 16 * _GIB
    memory_max_bytes: int | None = None
    storage_bytes: int = 10 * _GIB
    shm_bytes: int = _GIB
    volume: Claim | NewClaim | None = None
    mounts: tuple[tuple[str, str], ...] = ()
    files: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    user: int = 10001
    queue: str | None = None
    priority_class: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    retries: int = 3
    grace_s: int | Literal["auto"] = "auto"
    deadline_s: int | None = None
    ttl_s: int = 86_400
    pod_monitor: tuple[tuple[str, str], ...] | None = None
