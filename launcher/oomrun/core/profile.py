"""What one run learned of a job's memory, for the next one.

Covers: ``Profile``, its strict JSON form, how two of them are joined, and the key that
says which jobs may use it. Does not cover: the files (``oomrun.profiles``), the part of
the key that only the worker knows (``oomrun.worker.model_key``), predicting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Environment", "Profile", "ProfileError", "digest", "from_json", "full_key",
    "merge", "relevant_variables", "to_json",
]  # fmt: skip

# So many sizes are kept of each kind: the largest that ran, the smallest that failed.
# Small ones say little of large ones, and larger failures follow from smaller ones.
_SIZES = 64
_LARGEST_SIZE = 2**31 - 1
_LARGEST_INT = 2**63 - 1
# A need of more than this many times the peak is no fragmentation, but a mistake.
_LARGEST_RATIO = 100.0

# Part of every key: raise it when the engine comes to use memory in another way.
_ENGINE = 2


class ProfileError(ValueError):
    """A JSON value is no profile, or an environment is not known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is known of a job's memory on one kind of device.

    Attributes:
        state_bytes: weights and optimizer slots.
        measured: peak bytes by micro-batch, the highest that were seen.
        recorded: the least pool that has room for a step, by micro-batch.
        failed: micro-batches that ran out of memory, each with the highest limit in
            bytes that it did so under. Where no limit was known, nothing is.
        pool_ratio: what the allocator needs of its pool for each byte of a peak.
        steps: the most optimizer steps of one run that it stands on.
    """

    state_bytes: int | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    recorded: Mapping[int, int] = field(default_factory=dict)
    failed: Mapping[int, int] = field(default_factory=dict)
    pool_ratio: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        measured = sorted(self.measured.items())[-_SIZES:]
        recorded = sorted(self.recorded.items())[-_SIZES:]
        failed = sorted(self.failed.items())[:_SIZES]
        object.__setattr__(self, "measured", dict(measured))
        object.__setattr__(self, "recorded", dict(recorded))
        object.__setattr__(self, "failed", dict(failed))

    def smallest_failed(self, limit_bytes: int) -> int | None:
        """The smallest micro-batch that ran out under this limit or a higher one."""
        sizes = (size for size, limit in self.failed.items() if limit >= limit_bytes)
        return min(sizes, default=None)


def merge(a: Profile, b: Profile) -> Profile:
    """All that either profile knows.

    In whatever order and how often profiles are merged, the result is the same, so that
    runs need not agree on who writes first, and one that writes twice does no harm.
    """
    return Profile(
        state_bytes=_known(max, a.state_bytes, b.state_bytes),
        measured=_highest(a.measured, b.measured),
        recorded=_highest(a.recorded, b.recorded),
        failed=_highest(a.failed, b.failed),
        pool_ratio=_known(max, a.pool_ratio, b.pool_ratio),
        steps=max(a.steps, b.steps),
    )


def _known(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)


def _highest(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {size: max(a.get(size, 0), b.get(size, 0)) for size in {*a, *b}}


# -- as JSON -------------------------------------------------------------------


def to_json(profile: Profile) -> dict[str, Any]:
    """The profile as JSON-ready values."""
    return {
        "state_bytes": profile.state_bytes,
        "measured": [list(item) for item in profile.measured.items()],
        "recorded": [list(item) for item in profile.recorded.items()],
        "failed": [list(item) for item in profile.failed.items()],
        "pool_ratio": profile.pool_ratio,
        "steps": profile.steps,
    }


def from_json(value: object) -> Profile:
    """Reads a profile back, and nothing that ``to_json`` would not have written.

    Raises:
        ProfileError: anything about the value is odd.
    """
    names = {item.name for item in dataclasses.fields(Profile)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ProfileError("it is not an object with the fields of a profile")
    ratio = value["pool_ratio"]
    if ratio is not None and not (
        isinstance(ratio, float) and 1.0 <= ratio <= _LARGEST_RATIO
    ):
        raise ProfileError(f"pool_ratio: {ratio!r} is no ratio")
    state_bytes = value["state_bytes"]
    if state_bytes is not None:
        _integer("state_bytes", state_bytes, 0, _LARGEST_INT)
    return Profile(
        state_bytes=state_bytes,
        measured=_by_size("measured", value["measured"]),
        recorded=_by_size("recorded", value["recorded"]),
        failed=_by_size("failed", value["failed"]),
        pool_ratio=ratio,
        steps=_integer("steps", value["steps"], 0, _LARGEST_INT),
    )


def _by_size(name: str, value: object) -> dict[int, int]:
    if not isinstance(value, list) or len(value) > _SIZES:
        raise ProfileError(f"{name}: a list of at most {_SIZES} pairs was expected")
    found: dict[int, int] = {}
    last = 0
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise ProfileError(f"{name}: {item!r} is no pair of size and bytes")
        # Rising, and so each only once.
        last = _integer(f"{name} size", item[0], last + 1, _LARGEST_SIZE)
        found[last] = _integer(f"{name} bytes", item[1], 1, _LARGEST_INT)
    return found


def _integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProfileError(f"{name}: {value!r} is no integer of {low} to {high}")
    return value


# -- the key -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What, beside the model, decides how much memory a micro-batch takes.

    The limit is not in it: a profile tells what fits under any.

    Attributes:
        versions: by package; tensorflow, keras and oomrun at least.
        device_kind: cpu, gpu or mig.
        device_name: the device's model, as the driver or the kernel gives it.
        driver: the version of the GPU's driver; None for a CPU.
        cpu_count: cores: as many operations run at once and hold memory at once.
        memory_mode: growth, limit or preallocate.
        strategy: how replicas work together.
        replicas: how many.
        global_batch_size: samples of a step: they lie on the device, too.
        batch_norm: what the job file says of BatchNormalization.
        variables: the environment's, from ``relevant_variables``.
    """

    versions: Mapping[str, str]
    device_kind: str
    device_name: str
    driver: str | None
    cpu_count: int
    memory_mode: str
    strategy: str
    replicas: int
    global_batch_size: int
    batch_norm: str
    variables: Mapping[str, str]


def full_key(model_key: str, environment: Environment) -> str:
    """The key of a profile: equal for two jobs only where it fits both.

    It is text that a person can read, and the same whatever the order of mappings.

    Raises:
        ProfileError: a version that decides is missing.
    """
    for package in ("tensorflow", "keras", "oomrun"):
        if not environment.versions.get(package):
            raise ProfileError(f"the version of {package} is not known")
    known = {
        item.name: getattr(environment, item.name)
        for item in dataclasses.fields(environment)
    }
    known["versions"] = dict(environment.versions)
    known["variables"] = dict(environment.variables)
    content = {"engine": _ENGINE, "model": model_key, **known}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def digest(key: str) -> str:
    """A short name for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


_PREFIXES = ("TF_", "XLA_", "KERAS_", "CUDA_", "CUDNN_", "NVIDIA_", "ONEDNN_", "DNNL_")
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
# They name what is in the key in other words, or change from run to run and decide
# nothing: limits, places of files, logs, who is in a cluster.
_WITHOUT_EFFECT = frozenset(
    {
        "CUDA_CACHE_PATH", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES", "KERAS_HOME", "NVIDIA_VISIBLE_DEVICES", "TF_CONFIG",
        "TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MIN_VLOG_LEVEL",
        "TF_CPP_VMODULE", "TF_CPU_BFC_MEM_LIMIT_IN_MB",
    }
)  # fmt: skip
# Terraform's, whose prefix is TensorFlow's; and what may be secret, whoever reads it:
# the key is in the journal. No setting that decides over memory is called so.
_NEVER = re.compile(
    r"^TF_(VAR|CLI|TOKEN|REGISTRY|PLUGIN)_|TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY"
)


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that TensorFlow, XLA and the libraries under them are tuned by.

    Args:
        environment: a worker's whole environment.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and name not in _WITHOUT_EFFECT
        and not _NEVER.search(name)
    }
