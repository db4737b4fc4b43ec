"""The part of the table of keys that says how to run on a cluster."""

from oomrun.core.jobfile import values_kubernetes as values
from oomrun.core.jobfile.kinds import (
    Choice,
    Field,
    ListOf,
    MapOf,
    OneOf,
    Section,
    Text,
    Whole,
    choice,
)

_VOLUME = Section(
    "a mapping such as {claim: runs} or {size: 100GiB}",
    (
        Field(
            key="claim",
            kind=values.OBJECT,
            about="A PersistentVolumeClaim that is there already.",
            examples=("runs",),
        ),
        Field(
            key="size",
            kind=values.AMOUNT,
            about=(
                "The size of a claim to make. It is named after the job and stays when "
                "the job is deleted."
            ),
            examples=("100GiB",),
        ),
        Field(
            key="storage_class",
            kind=values.OBJECT,
            about="The storage class of the claim; the cluster's own without it.",
            examples=("fast",),
        ),
        Field(
            key="access",
            kind=choice("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"),
            about="How the claim may be mounted.",
            default="ReadWriteOnce",
            examples=("ReadWriteMany",),
        ),
    ),
)


def _labels(key: str, about: str, *, of: Text, example: dict[str, str]) -> Field:
    return Field(
        key=key,
        kind=MapOf("a mapping of labels", key=of, value=values.LABEL_VALUE),
        about=about,
        examples=(dict(example),),
    )


def _names(key: str, about: str, example: str) -> Field:
    return Field(
        key=key,
        kind=ListOf(f"a list such as [{example}]", item=values.OBJECT, unique=True),
        about=about,
        default=[],
        examples=([example],),
    )


_RESOURCES = (
    Field(
        key="gpus",
        kind=Whole(words="a number of GPUs", low=0, high=64),
        about=(
            "GPUs for each pod. The default is 1, and 0 where `devices` are the CPU."
        ),
        examples=(1,),
    ),
    Field(
        key="gpu_resource",
        kind=values.GPU_RESOURCE,
        about="What the cluster calls a GPU. MIG devices have names of their own.",
        default="nvidia.com/gpu",
        examples=("nvidia.com/mig-3g.40gb",),
    ),
    Field(
        key="gpu_memory",
        kind=OneOf((Choice({"auto": "auto", "any": "any"}), values.AMOUNT)),
        about=(
            "The memory that a GPU must have, by the labels of NVIDIA's GPU Feature "
            "Discovery. `auto` asks for what a run of the job in `runs/NAME` here has "
            "found out of its step, and for nothing where there was none: at least "
            "one sample at a time has to fit, and GPUs that hold the whole batch are "
            "preferred. `any` asks for nothing."
        ),
        default="auto",
        examples=("24GiB",),
    ),
    Field(
        key="pods",
        kind=Whole(words="a number of pods", low=1, high=1000),
        about=(
            "How many pods train together, each with the job's `devices`. Several need "
            "`strategy: horovod` or `multi_worker_mirrored`, and a `volume` that all "
            "of them can write to."
        ),
        default=1,
        examples=(2,),
    ),
    Field(
        key="mode",
        kind=choice("job", "jobset", "mpijob", "trainjob"),
        about=(
            "What the job is on the cluster: the Job of Kubernetes itself, which needs "
            "no operator, a JobSet, an MPIJob of Kubeflow's MPI operator, or a "
            "TrainJob of Kubeflow's trainer with a runtime of its own."
        ),
        default="job",
        examples=("jobset",),
    ),
    Field(
        key="cpu",
        kind=values.CPU,
        about="CPU cores for each pod.",
        default=4,
        examples=(8, "500m"),
    ),
    Field(
        key="memory",
        kind=values.AMOUNT,
        about="Host memory for each pod; `shm` is a part of it.",
        default="16GiB",
        examples=("32GiB", "32Gi"),
    ),
    Field(
        key="memory_max",
        kind=values.AMOUNT,
        about=(
            "What `oomrun submit --watch` may raise `memory` to where a pod was killed "
            "for host memory. Without it such a job is not submitted again."
        ),
        examples=("64GiB",),
    ),
    Field(
        key="shm",
        kind=values.AMOUNT,
        about="The size of `/dev/shm`, which is host memory.",
        default="1GiB",
        examples=("8GiB",),
    ),
    Field(
        key="storage",
        kind=values.AMOUNT,
        about=(
            "Local disk for each pod: `/tmp`, and the run itself where there is no "
            "`volume`."
        ),
        default="10GiB",
        examples=("50GiB",),
    ),
)

_FILES = (
    Field(
        key="volume",
        kind=_VOLUME,
        about=(
            "What `/workspace` is kept on: the folder that oomrun is called in, with "
            "`runs/NAME` in it. Without a volume a new pod begins from nothing."
        ),
    ),
    Field(
        key="mounts",
        kind=MapOf(
            "a mapping such as {/data: datasets}",
            key=values.MOUNT_PATH,
            value=values.OBJECT,
        ),
        about="Further PersistentVolumeClaims by their path, to read from.",
        examples=({"/data": "datasets"},),
    ),
    Field(
        key="files",
        kind=ListOf("a list such as [model.py]", item=values.FILE, unique=True),
        about=(
            "Files that the script needs beside it, relative to the folder of the job "
            "file. With the job file and the script they go along in a ConfigMap, of 1 "
            "MiB at most: put what is larger into the image or on a volume."
        ),
        default=[],
        examples=(["model.py"],),
    ),
    _names(
        "secrets",
        "Secrets whose keys become environment variables. What is secret has no place "
        "in `env`.",
        "wandb",
    ),
    _names("pull_secrets", "Secrets to pull the image with.", "registry"),
)

_PLACEMENT = (
    Field(
        key="service_account",
        kind=values.OBJECT,
        about="A service account that is there; without it the job gets its own.",
        examples=("trainer",),
    ),
    Field(
        key="user",
        kind=Whole(words="a user id", low=1, high=2**31 - 1),
        about="The user and group id in the pods. Root is refused.",
        default=10001,
        examples=(1000,),
    ),
    Field(
        key="queue",
        kind=values.QUEUE,
        about="The Kueue queue to wait in.",
        examples=("training",),
    ),
    Field(
        key="priority_class",
        kind=values.OBJECT,
        about="The priority class of the pods.",
        examples=("batch-low",),
    ),
    _labels(
        "node_selector",
        "Labels that a node must have.",
        of=values.PLAIN_KEY,
        example={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    ),
    Field(
        key="tolerations",
        kind=ListOf(
            "a list such as [dedicated=training:NoSchedule]",
            item=values.TOLERATION,
            unique=True,
        ),
        about=(
            "Taints that the pods do not mind, written as `kubectl taint` does; "
            "without a value any value is meant. That of GPUs is there already."
        ),
        default=[],
        examples=(["dedicated=training:NoSchedule"],),
    ),
    _labels(
        "labels",
        "Labels for every object.",
        of=values.LABEL_KEY,
        example={"team": "vision"},
    ),
    Field(
        key="annotations",
        kind=MapOf(
            "a mapping of annotations", key=values.FREE_KEY, value=values.ANNOTATION
        ),
        about="Annotations for the job and its pods.",
        examples=({"sidecar.istio.io/inject": "false"},),
    ),
)

_LIFE = (
    Field(
        key="retries",
        kind=Whole(words="a number of retries", low=0, high=1000),
        about=(
            "How many pods may fail in a way that another pod may not. Preemptions "
            "count for nothing, and what oomrun gave up is not tried again."
        ),
        default=3,
        examples=(10,),
    ),
    Field(
        key="grace",
        kind=OneOf((Choice({"auto": "auto"}), values.GRACE)),
        about=(
            "How long a pod that has to go may take for a checkpoint. oomrun itself "
            "gets 10 seconds less. `auto`: 2min, or more where checkpoints of a run of "
            "the job in `runs/NAME` here took long: twice as long as the slowest, and "
            "half a minute."
        ),
        default="auto",
        examples=("10min",),
    ),
    Field(
        key="deadline",
        kind=values.DEADLINE,
        about="How long the whole job may take, with all of its pods.",
        examples=("3d",),
    ),
    Field(
        key="ttl",
        kind=values.TTL,
        about="How long a finished job is kept for `kubectl logs` and the like.",
        default="1d",
        examples=("1h",),
    ),
    _labels(
        "pod_monitor",
        "Makes a PodMonitor for the Prometheus operator, with these labels: those "
        "that the operator selects by.",
        of=values.FREE_KEY,
        example={"release": "prometheus"},
    ),
)

KUBERNETES = Section(
    "a mapping such as {image: registry/train:1, gpus: 1}",
    (
        Field(
            key="image",
            kind=values.IMAGE,
            about=(
                "The container image, with oomrun, TensorFlow and what the script "
                "imports."
            ),
            examples=("registry/team/train:1",),
            required=True,
        ),
        Field(
            key="namespace",
            kind=values.NAMESPACE,
            about="The namespace; without it the one that the client is set to.",
            examples=("team-a",),
        ),
        *_RESOURCES,
        *_FILES,
        *_PLACEMENT,
        *_LIFE,
    ),
)
