"""The devices inside the training process: set up before user code, and read.

TensorFlow takes memory growth or a limit for a GPU, not both, alike on all GPUs, and
only before anything has touched the device; so this runs before the user's script.
A CPU device's limit is set by the environment that the supervisor gave us.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from oomrun.core.events import DeviceMemory
from oomrun.core.plan import DevicePlan, Plan

__all__ = ["DeviceProblemError", "read_memory", "reset_peaks", "set_up"]


class DeviceProblemError(RuntimeError):
    """TensorFlow does not see, or does not accept, what the plan gives it."""


def set_up(plan: Plan) -> None:
    """Applies the plan's memory settings to TensorFlow's devices.

    Raises:
        DeviceProblemError: a planned GPU is not visible, or was touched before.
    """
    planned = [device for device in plan.devices if device.kind != "cpu"]
    if not planned:
        return
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) != len(planned):
        raise DeviceProblemError(
            f"the plan gives this worker {len(planned)} GPU, TensorFlow sees "
            f"{len(gpus)}: is this TensorFlow built for GPUs, and for this driver?"
        )
    try:
        for gpu, device in zip(gpus, planned, strict=True):
            _set_up_gpu(gpu, device, plan.memory_mode)
    except (RuntimeError, ValueError) as error:
        raise DeviceProblemError(str(error)) from error


def _set_up_gpu(gpu: Any, device: DevicePlan, mode: str) -> None:
    if mode == "growth":
        tf.config.experimental.set_memory_growth(gpu, True)
    elif mode == "limit" and device.limit_bytes is not None:
        limit_mib = device.limit_bytes // 2**20
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)]
        )


def read_memory(plan: Plan) -> tuple[DeviceMemory, ...]:
    """In-use and peak bytes of TensorFlow's own allocator, per planned device.

    A CPU device without a limit uses the system's allocator, which counts nothing:
    its values are None.
    """
    return tuple(
        _read(name, device)
        for name, device in zip(_names(plan), plan.devices, strict=True)
    )


def _read(name: str, device: DevicePlan) -> DeviceMemory:
    in_use = peak = None
    try:
        info = tf.config.experimental.get_memory_info(name)
        # The system's allocator, on a CPU without a limit, counts nothing and says 0.
        if info["peak"]:
            in_use, peak = int(info["current"]), int(info["peak"])
    except (ValueError, RuntimeError):
        pass
    return DeviceMemory(
        device=device.id,
        in_use_bytes=in_use,
        peak_bytes=peak,
        limit_bytes=device.limit_bytes,
    )


def reset_peaks(plan: Plan) -> None:
    """Starts a new window: the peak becomes what is in use now."""
    for name in _names(plan):
        try:
            tf.config.experimental.reset_memory_stats(name)
        except (ValueError, RuntimeError):
            continue


def _names(plan: Plan) -> list[str]:
    names = []
    gpus = 0
    for device in plan.devices:
        if device.kind == "cpu":
            names.append("CPU:0")
        else:
            names.append(f"GPU:{gpus}")
            gpus += 1
    return names
