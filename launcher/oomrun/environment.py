"""A worker's environment, from ours, the job's ``env`` and the plan.

Covers: device visibility and memory limits that TensorFlow reads when it starts, what
the user set that the plan overrules, and what makes restarts repeatable.
Does not cover: settings made in the worker (``oomrun.worker.devices``).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from oomrun.core.command import TOLD
from oomrun.core.errors import Problem, SpecError
from oomrun.core.launch import LAUNCH_FILE, RUN_TOKEN
from oomrun.core.plan import Plan
from oomrun.core.planning import reserve_bytes

__all__ = [
    "check_backend", "command_environment", "horovod_installed", "overruled",
    "source_roots", "worker_environment",
]  # fmt: skip

_log = logging.getLogger(__name__)

_MIB = 1024 * 1024
_ALLOCATOR = "TF_GPU_ALLOCATOR"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"  # TensorFlow reads "true" and "false" only
_KEPT_FREE = "TF_DEVICE_MIN_SYS_MEMORY_IN_MB"
_HASH_SEEDS = 2**32  # PYTHONHASHSEED is below this.


def check_backend(
    base: Mapping[str, str], own: Mapping[str, str], job_file: str
) -> None:
    """Refuses a Keras backend that oomrun cannot train with.

    Raises:
        SpecError: ``KERAS_BACKEND`` is set, and not to tensorflow.
    """
    backend = {**base, **own}.get("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow":
        return
    inside = "KERAS_BACKEND" in own
    where = "here" if inside else "in the environment of oomrun"
    raise SpecError(
        [
            Problem(
                file=job_file,
                line=1,
                column=1,
                path="env.KERAS_BACKEND",
                message=f"is {backend!r} {where}; oomrun trains with tensorflow only",
                hint="remove it" if inside else "unset it, or set it to tensorflow",
            )
        ]
    )


def worker_environment(
    base: Mapping[str, str],
    own: Mapping[str, str],
    plan: Plan,
    *,
    run_id: str,
    seed: int,
    launch_file: Path,
    roots: Sequence[Path] = (),
) -> dict[str, str]:
    """The whole environment of a worker but for its socket.

    What the user set wins, in the job file or around oomrun, except for what the plan
    decides: which devices are seen and how much memory they give.

    Args:
        base: the environment that oomrun was called in.
        own: the job file's ``env``.
        plan: the attempt's plan.
        run_id: the run, by which leftover processes are recognised.
        seed: the run's seed.
        launch_file: the attempt's ``launch.json``.
        roots: folders that must be importable, from ``source_roots``.
    """
    env = {**base, **own}
    env.setdefault("KERAS_BACKEND", "tensorflow")
    # A script whose result hangs on the order of a set must not change over a restart.
    env.setdefault("PYTHONHASHSEED", str(seed % _HASH_SEEDS))
    # The last lines before a crash are the ones that are looked for.
    env.setdefault("PYTHONUNBUFFERED", "1")
    for text in overruled(env, plan):
        _tell(text)
    env.update(_devices(plan))
    env.update(_gpu_memory(env, plan))
    env[RUN_TOKEN] = run_id
    env[LAUNCH_FILE] = str(launch_file)
    if roots:
        # Last, so that nothing of the user's is shadowed.
        paths = [env.get("PYTHONPATH", ""), *map(str, roots)]
        env["PYTHONPATH"] = ":".join(path for path in paths if path)
    return env


def command_environment(
    base: Mapping[str, str],
    own: Mapping[str, str],
    plan: Plan,
    *,
    run_id: str,
    launch_file: Path,
) -> dict[str, str]:
    """The whole environment of a command, and of the guard that starts it.

    Which devices are seen is set as for a worker, and memory as far as variables can.
    Nothing else is: the program may be anything.

    Args:
        base: the environment that oomrun was called in.
        own: the job file's ``env``, filled in, with what the program is told.
        plan: the attempt's plan.
        run_id: the run, by which leftover processes are recognised.
        launch_file: the attempt's ``launch.json``, for the guard.
    """
    # Under an oomrun inside another one, what the outer one told is not for this one.
    env = {**{key: base[key] for key in base if key not in TOLD}, **own}
    # The last lines before a crash are the ones that are looked for.
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.update(_devices(plan))
    if any(device.kind != "cpu" for device in plan.devices):
        grows = plan.memory_mode != "preallocate"
        env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true" if grows else "false"
    env[RUN_TOKEN] = run_id
    env[LAUNCH_FILE] = str(launch_file)
    return env


def _devices(plan: Plan) -> dict[str, str]:
    if all(device.kind == "cpu" for device in plan.devices):
        # A GPU that the job does not use must not lose memory to its context.
        env = {"CUDA_VISIBLE_DEVICES": "-1"}
        limits = [d.limit_bytes for d in plan.devices if d.limit_bytes is not None]
        if limits:
            # The limit is the process's, whatever number of CPU devices it has.
            env["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
            env["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(max(1, sum(limits) // _MIB))
            # oneDNN's kernels do not check what they allocate: out of memory in one of
            # them is a segmentation fault, not a ResourceExhaustedError.
            env["TF_ENABLE_ONEDNN_OPTS"] = "0"
        return env
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(device.id for device in plan.devices),
    }


def _gpu_memory(given: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """The variables that decide how a worker takes GPU memory, by ``memory.mode``.

    What the user gave stays where it does not contradict the mode: with ``limit``,
    whether the limit is grown up to or taken at once.
    """
    if all(device.kind == "cpu" for device in plan.devices):
        return {}
    if plan.memory_mode == "growth":
        # TensorFlow would keep its pool 0.5 to 1.8 GiB smaller than what is free, by
        # the card's generation, which is below the plan's limit on small cards. Half of
        # our reserve, since the CUDA context is there already when it looks.
        limits = [d.limit_bytes for d in plan.devices if d.limit_bytes is not None]
        kept_mib = reserve_bytes(min(limits, default=None)) // 2 // _MIB
        grown = {_GROWTH: "true", _KEPT_FREE: given.get(_KEPT_FREE, str(kept_mib))}
        if "allocator" in plan.levers:
            grown[_ALLOCATOR] = "cuda_malloc_async"
        return grown
    env = {_GROWTH: "false"}
    if plan.memory_mode == "limit":
        # TensorFlow's functions allow growth or a limit; this variable adds growth.
        env[_GROWTH] = given[_GROWTH] if given.get(_GROWTH) == "false" else "true"
    if given.get(_ALLOCATOR, "").startswith("cuda_malloc"):
        env[_ALLOCATOR] = ""
    return env


def overruled(given: Mapping[str, str], plan: Plan) -> tuple[str, ...]:
    """What of the user's variables the plan does not let stand, in sentences.

    Args:
        given: the job file's ``env`` over the environment of oomrun.
        plan: the attempt's plan.
    """
    mode = plan.memory_mode
    why = {
        _ALLOCATOR: "the lever allocator decides"
        if "allocator" in plan.levers
        else f"it does not keep to a limit, and memory.mode is {mode}",
        _GROWTH: f"memory.mode decides, and is {mode}",
        "TF_CPU_ALLOCATOR_USE_BFC": "memory.limit needs it",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "memory.limit decides",
        "TF_ENABLE_ONEDNN_OPTS": "oneDNN crashes where memory runs out at a limit",
    }
    decided = {**_devices(plan), **_gpu_memory(given, plan)}
    return tuple(
        f"{name}={given[name]} is not used: {why[name]}"
        for name, value in decided.items()
        if name in why and given.get(name, value) != value
    )


def horovod_installed() -> bool:
    """Whether workers, which have our interpreter, would find Horovod."""
    return importlib.util.find_spec("horovod") is not None


@functools.cache
def _tell(text: str) -> None:
    """Once for all attempts."""
    _log.warning("%s", text)


def source_roots() -> tuple[Path, ...]:
    """The folders our packages are in, less those a new interpreter looks into anyway.

    In a source checkout that is ``launcher`` and ``strategies``; installed, nothing,
    since site-packages in front of the standard library would shadow it.
    """
    standard = {Path(path) for path in (*site.getsitepackages(), *_user_site())}
    roots = []
    for package in ("oomrun", "oomrun_strategies"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).resolve().parent.parent
            if root not in standard and root not in roots:
                roots.append(root)
    return tuple(roots)


def _user_site() -> tuple[str, ...]:
    return (site.getusersitepackages(),) if not sys.flags.no_user_site else ()
