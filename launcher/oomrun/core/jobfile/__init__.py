"""A job file's text -> ``JobSpec``, or every problem in it at once.

Covers: putting the parts together (``document`` reads YAML, ``overrides`` puts
``--set`` over it, ``reading`` checks each key, ``checks`` checks them together) and
making the spec.
Does not cover: files. Whether the script is there is for the shell to see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomrun.core.errors import Problem, SpecError
from oomrun.core.jobfile import checks, document, overrides, reading
from oomrun.core.jobfile.document import decode
from oomrun.core.jobfile.fields import JOB
from oomrun.core.jobfile.nodes import Broken, Place, Scalar, Table, join
from oomrun.core.jobfile.reading import Reading
from oomrun.core.kubernetes_spec import Claim, KubernetesSpec, NewClaim
from oomrun.core.spec import (
    AUTO,
    Auto,
    BasicAuth,
    BatchSpec,
    CheckpointSpec,
    Command,
    Cpus,
    Devices,
    EverySeconds,
    Gpus,
    Hostfile,
    Hosts,
    JobSpec,
    MemorySpec,
    MetricsSpec,
    Module,
    Program,
    RecoverySpec,
    RestartLimits,
    Script,
    Secret,
    Tls,
)

__all__ = ["Examination", "decode", "examine", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a job file says: a spec if there are no problems.

    ``values`` and ``places`` are by path (``memory.limit``) and have what is good by
    itself and what is there at all, so that more can be checked beside the problems.
    """

    spec: JobSpec | None
    problems: tuple[Problem, ...]
    values: Mapping[str, object]
    places: Mapping[str, Place]


def load(
    text: str,
    *,
    filename: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str],
) -> JobSpec:
    """The spec that a job file describes.

    Args:
        text: The file's text; ``decode`` makes it from bytes.
        filename: What problems call the file.
        overrides: ``path=value`` each, as given to ``--set``.
        environment: Where ``${VAR}`` is looked up.

    Raises:
        SpecError: Something is wrong, with all problems in the order of the file.
    """
    examined = examine(
        text, filename=filename, overrides=overrides, environment=environment
    )
    if examined.spec is None:
        raise SpecError(examined.problems)
    return examined.spec


def examine(
    text: str,
    *,
    filename: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str],
) -> Examination:
    """As ``load``, but what is wrong is part of the answer. Never raises."""
    root, problems = _root(text, filename, overrides)
    found = Reading(environment)
    if root is not None:
        found = reading.read(root, JOB, environment)
        checks.check(found)
    problems = _in_order(problems + found.problems, filename)
    return Examination(
        spec=None if problems else _spec(found),
        problems=tuple(problems),
        values=found.values,
        places=found.places,
    )


def _root(
    text: str, filename: str, changes: Sequence[str]
) -> tuple[Table | None, list[Problem]]:
    root, problems = document.parse(text, file=filename)
    if isinstance(root, Table):
        root, more = overrides.apply(root, changes)
        return root, problems + more
    if problems and (root is None or isinstance(root, Broken)):
        return None, problems
    if root is None or (isinstance(root, Scalar) and not root.text):
        got = "an empty file"
    else:
        got = "text" if isinstance(root, Scalar) else "a list"
    place = Place(filename, 1, 1) if root is None else root.place
    wrong = f"expected {JOB.words}, got {got}"
    return None, [*problems, place.problem("", wrong, "oomrun init writes one")]


def _in_order(problems: list[Problem], filename: str) -> list[Problem]:
    """As the user reads: the file from top to bottom, then the command line."""
    return sorted(problems, key=lambda p: (p.file != filename, p.line, p.column))


def _spec(found: Reading) -> JobSpec:
    given = found.values
    name = str(given["name"])
    return JobSpec(
        name=name,
        program=_program(found),
        env=_env(found),
        devices=_devices(given),
        batch=_batch(given),
        memory=_memory(found),
        recovery=_recovery(given),
        checkpoint=_checkpoint(given, name),
        metrics=_metrics(given),
        kubernetes=_kubernetes(found),
        **_some(given, "", strategy="strategy"),
        hosts=_hosts(given),
    )


def _some(given: Mapping[str, object], section: str, **keys: str) -> dict[str, Any]:
    """Keyword arguments for those keys that are given; the spec has the defaults."""
    paths = {field: join(section, key) for field, key in keys.items()}
    return {field: given[path] for field, path in paths.items() if path in given}


def _program(found: Reading) -> Program:
    given = found.values
    if "command" in given:
        words = range(len(_words(given["command"])))
        return Command(argv=tuple(found.templates[f"command[{n}]"] for n in words))
    args = _words(given.get("args", ()))
    if "module" in given:
        return Module(name=str(given["module"]), args=args)
    return Script(path=str(given["script"]), args=args)


def _env(found: Reading) -> tuple[tuple[str, str], ...]:
    given = found.values.get("env")
    pairs = given if isinstance(given, tuple) else ()
    if "command" in found.values:
        return tuple((key, found.templates[join("env", key)]) for key, _ in pairs)
    return pairs


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _devices(given: Mapping[str, object]) -> Devices:
    value, count = given.get("devices", AUTO), given.get("devices.cpu")
    if isinstance(count, int):
        return Cpus(count=count)
    if isinstance(value, tuple):
        return Gpus(ids=value)
    if isinstance(value, Gpus):
        return value
    return Cpus() if value == "cpu" else AUTO


def _hosts(given: Mapping[str, object]) -> Hosts:
    value, file = given.get("hosts"), given.get("hosts.file")
    if isinstance(file, str):
        return Hostfile(file)
    if isinstance(value, tuple):
        return tuple(map(str, value))
    return "slurm" if value == "slurm" else None


def _batch(given: Mapping[str, object]) -> BatchSpec:
    values = _some(given, "batch", global_size="global", micro="micro")
    values.update(_some(given, "batch", micro="micro.max", batch_norm="batch_norm"))
    values.update(_some(given, "batch", shares="shares"))
    return BatchSpec(**values)


def _memory(found: Reading) -> MemorySpec:
    values = _some(found.values, "memory", mode="mode", reserve="reserve")
    values.update(_some(found.values, "memory", headroom="headroom"))
    values.update(_some(found.values, "memory", probe="probe"))
    limit = found.values.get(checks.limit_path(found), AUTO)
    values["limit"] = limit
    if limit != AUTO and values.get("mode") != "preallocate":
        values["mode"] = "limit"
    return MemorySpec(**values)


def _metrics(given: Mapping[str, object]) -> MetricsSpec:
    values = _some(
        given,
        "metrics",
        listen="listen",
        port_taken="port_taken",
        textfile="textfile",
        pushgateway="pushgateway",
    )
    tls = _some(
        given,
        "metrics.tls",
        certificate="certificate",
        key="key",
        client_ca="client_ca",
    )
    if tls:
        values["tls"] = Tls(**tls)
    values["token"] = _secret(given, "metrics.token")
    user = given.get("metrics.basic_auth.user")
    password = _secret(given, "metrics.basic_auth.password")
    if user is not None and password is not None:
        values["basic_auth"] = BasicAuth(user=str(user), password=password)
    return MetricsSpec(**values)


def _secret(given: Mapping[str, object], section: str) -> Secret | None:
    found = _some(given, section, file="file", variable="env")
    return Secret(**found) if found else None


def _recovery(given: Mapping[str, object]) -> RecoverySpec:
    causes = {cause: cause for cause in ("oom", "crash", "preemption", "hang")}
    limits = _some(given, "recovery.max_restarts", **causes)
    keys = ("in_process", "levers", "pulled", "hang_after", "grow_back")
    values = _some(given, "recovery", **{key: key for key in keys})
    if "hang_after" in values:
        values["hang_after"] = _hang_after(values["hang_after"])
    return RecoverySpec(max_restarts=RestartLimits(**limits), **values)


def _hang_after(value: Any) -> Auto | float | None:
    if isinstance(value, EverySeconds):
        return float(value.seconds)
    return None if value == "never" else AUTO


def _checkpoint(given: Mapping[str, object], name: str) -> CheckpointSpec:
    values = _some(given, "checkpoint", directory="dir", every="every", keep="keep")
    timeout = given.get("checkpoint.timeout")
    if isinstance(timeout, EverySeconds):
        values["timeout_s"] = float(timeout.seconds)
    if "directory" in values:
        values["directory"] = values["directory"].replace("{name}", name)
    return CheckpointSpec(**values)


def _kubernetes(found: Reading) -> KubernetesSpec | None:
    given = found.values
    if "kubernetes" not in found.places:
        return None
    same = (
        "image", "namespace", "gpus", "gpu_resource", "gpu_memory", "mounts", "files",
        "secrets", "pull_secrets", "service_account", "user", "queue",
        "priority_class", "node_selector", "tolerations", "labels", "annotations",
        "retries", "pod_monitor", "mode", "pods",
    )  # fmt: skip
    values = _some(given, "kubernetes", **{key: key for key in same})
    values.setdefault("gpus", int(not checks.on_cpu(found)))
    values |= _some(given, "kubernetes", cpu_millicores="cpu", memory_bytes="memory")
    values |= _some(given, "kubernetes", memory_max_bytes="memory_max")
    values |= _some(given, "kubernetes", shm_bytes="shm", storage_bytes="storage")
    values |= _some(given, "kubernetes", grace_s="grace", ttl_s="ttl")
    values |= _some(given, "kubernetes", deadline_s="deadline")
    return KubernetesSpec(volume=_pod_volume(given), **values)


def _pod_volume(given: Mapping[str, object]) -> Claim | NewClaim | None:
    base = "kubernetes.volume"
    if f"{base}.claim" in given:
        return Claim(str(given[f"{base}.claim"]))
    if f"{base}.size" not in given:
        return None
    keys = {key: key for key in ("storage_class", "access")}
    return NewClaim(**_some(given, base, size_bytes="size", **keys))
