"""What the user asked for, checked and typed. Never changed afterwards.

Covers: the values of a job file after reading, with their defaults.
Does not cover: reading the file (``jobfile``), what is really run (``plan``).
"""

from dataclasses import dataclass, field
from typing import Literal

from oomrun.core.kubernetes_spec import KubernetesSpec
from oomrun.core.remote import is_remote


@dataclass(frozen=True, slots=True)
class Auto:
    """oomrun chooses."""


AUTO = Auto()


@dataclass(frozen=True, slots=True)
class Bytes:
    """An amount of memory as a number of bytes."""

    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """An amount of memory as a fraction of what the device has (0 to 1)."""

    fraction: float


Amount = Bytes | Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """``python path args``; the path is relative to the job file's folder."""

    path: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """``python -m name args``."""

    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any program that takes its micro-batch from its arguments."""

    argv: tuple[str, ...]


Program = Script | Module | Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """These GPUs, by index or by UUID; None means every GPU there is."""

    ids: tuple[int | str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """The CPU as a number of devices, each with its own memory limit."""

    count: int = 1


Devices = Auto | Gpus | Cpus
StrategyName = Literal["auto", "single", "mirrored", "horovod", "multi_worker_mirrored"]
#: The strategies that start a worker for each device.
IN_WORKERS = ("horovod", "multi_worker_mirrored")
#: The levers that replace the optimizer, the one that keeps most first.
OPTIMIZERS = ("optimizer_lion", "optimizer_adafactor", "optimizer_sgd")
BatchNorm = Literal["micro_batch", "freeze", "refuse"]
MemoryMode = Literal["growth", "limit", "preallocate"]


@dataclass(frozen=True, slots=True)
class AtMost:
    """oomrun chooses the micro-batch, up to this size."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The global batch size (None: what the script says), and how it is cut up."""

    global_size: int | None = None
    micro: Auto | int | AtMost = AUTO
    batch_norm: BatchNorm = "micro_batch"
    shares: Literal["auto", "by_memory"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """How much memory each device may use.

    ``limit`` is one amount for every device or a tuple with one per device. A limit
    that was given makes ``mode`` "limit", unless it says "preallocate".
    """

    mode: MemoryMode = "growth"
    limit: Auto | Amount | tuple[Amount, ...] = AUTO
    reserve: Auto | Bytes = AUTO
    headroom: Amount = Share(0.08)
    probe: Literal["auto", "never"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How many restarts each cause may have; None is no limit."""

    oom: int | None = 10
    crash: int | None = 3
    preemption: int | None = None
    hang: int | None = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """What may be done when memory runs out or a worker dies.

    ``pulled``: levers that are in force from the first attempt on. ``hang_after``:
    seconds of silence after which a worker counts as hanging; None: never.
    """

    in_process: Literal["auto", "never"] = "auto"
    levers: tuple[str, ...] = ("micro_batch",)
    pulled: tuple[str, ...] = ()
    max_restarts: RestartLimits = field(default_factory=RestartLimits)
    hang_after: Auto | float | None = AUTO
    grow_back: bool = True

    @property
    def left(self) -> tuple[str, ...]:
        """Of ``levers`` those that are not in force from the beginning."""
        return tuple(lever for lever in self.levers if lever not in self.pulled)

    def in_force(self, later: tuple[str, ...]) -> tuple[str, ...]:
        """All levers of an attempt, ``later`` being those that the run came to."""
        return tuple(dict.fromkeys((*self.pulled, *later)))


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Again after this many optimizer steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Again after this much time."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints go (None: into the run directory), how often, how many stay.

    ``directory`` is relative to the job file's folder, or a URL; variables and
    ``{name}`` are already filled in. One that takes longer than ``timeout_s`` is given
    up.
    """

    directory: str | None = None
    every: EverySteps | EverySeconds = EverySeconds(300.0)
    keep: int = 3
    timeout_s: float = 600.0

    @property
    def url(self) -> str | None:
        """The directory where it is not one of this machine's."""
        return self.directory if is_remote(self.directory) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """An address to listen on; port 0 means any free one."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Where a secret is, in a file or in a variable: never the secret itself."""

    file: str | None = None
    variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM, relative to the job file's folder."""

    certificate: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicAuth:
    """A user who may scrape."""

    user: str
    password: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSpec:
    """Where the metrics are found, and by whom.

    Attributes:
        listen: no endpoint if it is None.
        port_taken: ``next`` takes the next free port, ``error`` ends oomrun.
        token, basic_auth: at most one of them; who may scrape, everyone without.
        textfile: for node_exporter.
        pushgateway: URL, told once at the end.
    """

    listen: Listen | None = Listen(host="127.0.0.1", port=9464)
    port_taken: Literal["next", "error"] = "next"
    tls: Tls | None = None
    token: Secret | None = None
    basic_auth: BasicAuth | None = None
    textfile: str | None = None
    pushgateway: str | None = None

    @property
    def secret_variables(self) -> frozenset[str]:
        """The variables that hold secrets, which are no script's business."""
        password = self.basic_auth.password if self.basic_auth else None
        found = (secret.variable for secret in (self.token, password) if secret)
        return frozenset(name for name in found if name)


@dataclass(frozen=True, slots=True)
class Hostfile:
    """A file that names hosts, as MPI reads it."""

    path: str


#: The hosts of a job; None: the one that oomrun runs on.
Hosts = tuple[str, ...] | Literal["slurm"] | Hostfile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job as the user wrote it."""

    name: str
    program: Program
    env: tuple[tuple[str, str], ...] = ()
    strategy: StrategyName = "auto"
    devices: Devices = AUTO
    hosts: Hosts = None
    batch: BatchSpec = field(default_factory=BatchSpec)
    memory: MemorySpec = field(default_factory=MemorySpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    metrics: MetricsSpec = field(default_factory=MetricsSpec)
    kubernetes: KubernetesSpec | None = None


def mathematics(spec: JobSpec) -> dict[str, object]:
    """What decides the trained model, as JSON values.

    An unfinished run whose job file now gives another answer here would go on as a
    different training; everything else (memory, devices, recovery) may change.
    """
    found: dict[str, object] = {
        "program": _program(spec.program),
        "env": dict(sorted(spec.env)),
        "batch.global": spec.batch.global_size,
    }
    if spec.batch.batch_norm == "freeze":
        found["batch.batch_norm"] = "freeze"
    return found


def _program(program: Program) -> dict[str, object]:
    match program:
        case Script(path=path, args=args):
            return {"script": path, "args": list(args)}
        case Module(name=name, args=args):
            return {"module": name, "args": list(args)}
        case Command(argv=argv):
            return {"command": list(argv)}
