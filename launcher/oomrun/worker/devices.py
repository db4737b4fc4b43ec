"""The devices inside the training process: set up before user code, and read.

TensorFlow takes memory growth or a limit for a GPU, not both, alike on all GPUs, and
only before anything has touched the device; so this runs before the user's script:

- ``growth``: memory growth. The limit of the plan is soft: nothing holds TensorFlow to
  it but the micro-batch, which is planned into it.
- ``limit``: one logical device as large as the limit, which is hard. That it grows up
  to it, instead of taking it at once, is a variable's doing (``environment``).
- ``preallocate``: the same logical device, all of it taken when TensorFlow first uses
  the GPU; where no limit is known, nearly all that is free, as TensorFlow does.

A CPU device's limit is set by the environment that the supervisor gave us. Several CPU
devices of a process share one allocator: TensorFlow takes no limit for each, and its
numbers are those of all of them, which are reported as the first one's.

TensorFlow's allocator waits up to 10 s for memory to come back before it reports that
there is none. A GPU's need not (``disallow_retry_on_allocation_failure`` in the GPU
options), but that is left as it is: parts of a step run beside each other, and how much
they hold together depends on their order, so that waiting lets steps near the limit
pass which would fail without.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from oomrun.core.events import DeviceMemory
from oomrun.core.plan import DevicePlan, Plan
from oomrun.worker import pool

__all__ = ["DeviceProblemError", "names", "read_memory", "reset_peaks", "set_up"]

_MIB = 2**20


class DeviceProblemError(SystemExit):
    """TensorFlow does not see, or does not accept, what the plan gives it.

    It ends the worker with its text and no traceback: the place to mend it is outside.
    """


def set_up(plan: Plan) -> None:
    """Applies the plan's memory settings to TensorFlow's devices, and keeps them.

    Raises:
        DeviceProblemError: a planned GPU is not visible, or was touched before.
    """
    _names_by_id.update(zip((d.id for d in plan.devices), _names(plan), strict=True))
    planned = [device for device in plan.devices if device.kind != "cpu"]
    if not planned:
        _set_up_cpus(len(plan.devices))
        return
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) != len(planned):
        raise DeviceProblemError(
            f"oomrun: the plan gives this worker {len(planned)} GPU, but TensorFlow "
            f"{tf.__version__} sees {len(gpus)}: it may be built without CUDA, or not "
            "find CUDA's libraries (pip install 'tensorflow[and-cuda]' brings them). "
            "To train on the CPU, write `devices: cpu` in the job file"
        )
    try:
        for gpu, device in zip(gpus, planned, strict=True):
            _set_up_gpu(gpu, device, plan.memory_mode)
    except (RuntimeError, ValueError) as error:
        raise DeviceProblemError(
            f"oomrun: the GPUs' memory cannot be set up: {error}. Does something use "
            "TensorFlow before the script, such as a sitecustomize module?"
        ) from error
    _keep(gpus, plan.memory_mode)


def _set_up_cpus(count: int) -> None:
    if count > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )


def _set_up_gpu(gpu: Any, device: DevicePlan, mode: str) -> None:
    if mode == "growth":
        tf.config.experimental.set_memory_growth(gpu, True)
    elif device.limit_bytes is not None:
        limit_mib = max(1, device.limit_bytes // _MIB)
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)]
        )


def _keep(gpus: Sequence[Any], mode: str) -> None:
    """From now on the script's own memory settings of these GPUs change nothing.

    Many scripts set growth or a limit in their first lines. TensorFlow would raise
    where the plan has set the other, and else the script would undo the plan.
    """
    for config in (tf.config, tf.compat.v1.config, tf.compat.v2.config):
        for place, name in (
            (config, "set_logical_device_configuration"),
            (config.experimental, "set_virtual_device_configuration"),
            (config.experimental, "set_memory_growth"),
        ):
            if hasattr(place, name):
                setattr(place, name, _kept(getattr(place, name), name, gpus, mode))


def _kept(
    original: Callable[..., None], name: str, gpus: Sequence[Any], mode: str
) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def setting(*args: Any, **named: Any) -> None:
        device, value = signature.bind(*args, **named).arguments.values()
        if device not in gpus:
            original(*args, **named)
        elif (name, value, mode) != ("set_memory_growth", True, "growth"):
            print(
                f"oomrun: {name} of the script is left out: memory.mode in the job "
                f"file, here {mode}, decides how the GPU's memory is taken",
                file=sys.stderr,
            )

    return setting


def read_memory(plan: Plan) -> tuple[DeviceMemory, ...]:
    """In-use and peak bytes of TensorFlow's own allocator, per planned device.

    A CPU device without a limit uses the system's allocator, which counts large tensors
    only, each as the next power of two (measured): its values are None.
    """
    return tuple(
        _read(name, device)
        for name, device in zip(names(plan), plan.devices, strict=True)
    )


def _read(name: str, device: DevicePlan) -> DeviceMemory:
    in_use = peak = None
    limit = device.limit_bytes
    if device.kind == "cpu" and len(_names_by_id) > 1:
        limit = pool.limit_bytes() if name == "CPU:0" else None
    if device.kind != "cpu" or limit is not None:
        with contextlib.suppress(ValueError, RuntimeError):
            info = tf.config.experimental.get_memory_info(name)
            in_use, peak = int(info["current"]), int(info["peak"])
    return DeviceMemory(
        device=device.id,
        in_use_bytes=in_use,
        peak_bytes=peak,
        limit_bytes=limit,
    )


def reset_peaks(plan: Plan) -> None:
    """Starts a new window: the peak becomes what is in use now."""
    for name in names(plan):
        try:
            tf.config.experimental.reset_memory_stats(name)
        except (ValueError, RuntimeError):
            continue


#: TensorFlow's names of this process's devices.
_names_by_id: dict[str, str] = {}


def names(plan: Plan) -> list[str]:
    """TensorFlow's names of a plan's devices: all of this process, or some of them."""
    return [
        _names_by_id.get(device.id, name)
        for device, name in zip(plan.devices, _names(plan), strict=True)
    ]


def _names(plan: Plan) -> list[str]:
    counts: dict[str, int] = {}
    found = []
    for device in plan.devices:
        kind = "CPU" if device.kind == "cpu" else "GPU"
        found.append(f"{kind}:{counts.get(kind, 0)}")
        counts[kind] = counts.get(kind, 0) + 1
    return found
