"""The metrics of the machine itself: its GPUs and its host's memory.

Covers: what is there whether or not something runs. Does not cover: a run's own
(``run_families.py``, ``device_families.py``), which join by ``device``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oomrun.core.machine import GpuReading, MachineReading
from oomrun.metrics.family import Family, Sample

__all__ = ["MACHINE_FAMILIES"]

_GPU_LABELS = ("device", "device_kind")


def _of_gpus(
    read: Callable[[GpuReading], float | None],
) -> Callable[[MachineReading], Iterable[Sample]]:
    return lambda machine: [((gpu.id, gpu.kind), read(gpu)) for gpu in machine.gpus]


def _of_host(
    read: Callable[[MachineReading], float | None],
) -> Callable[[MachineReading], Iterable[Sample]]:
    return lambda machine: [((), read(machine))]


def _hardware(machine: MachineReading) -> Iterable[Sample]:
    """By a MIG device's parent, too: other exporters name it by that and a number."""
    for gpu in machine.gpus:
        bare = gpu.gpu_uuid.removeprefix("GPU-")
        yield (
            (
                gpu.id, gpu.gpu_uuid, bare, gpu.gpu_instance_id, gpu.model,
                machine.driver_version,
            ),
            1.0,
        )  # fmt: skip


MACHINE_FAMILIES: tuple[Family[MachineReading], ...] = (
    Family(
        "oomrun_gpu_hardware_info", "info",
        "A GPU or MIG device of the machine; joins with other exporters by UUID.",
        _hardware,
        ("device", "UUID", "uuid", "GPU_I_ID", "model", "driver_version"),
    ),
    Family(
        "oomrun_gpu_memory_total_bytes", "gauge",
        "Memory of the GPU, as its driver tells.",
        _of_gpus(lambda gpu: gpu.total_bytes), _GPU_LABELS,
    ),
    Family(
        "oomrun_gpu_memory_used_bytes", "gauge",
        "Memory of the GPU that any process holds, as its driver tells.",
        _of_gpus(lambda gpu: gpu.used_bytes), _GPU_LABELS,
    ),
    Family(
        "oomrun_gpu_utilization_ratio", "gauge",
        "Share of the driver's last sample in which something ran on the GPU.",
        _of_gpus(lambda gpu: gpu.utilization), _GPU_LABELS,
    ),
    Family(
        "oomrun_gpu_temperature_celsius", "gauge", "Temperature of the GPU.",
        _of_gpus(lambda gpu: gpu.temperature_c), _GPU_LABELS,
    ),
    Family(
        "oomrun_gpu_power_watts", "gauge", "Power that the GPU draws.",
        _of_gpus(lambda gpu: gpu.power_w), _GPU_LABELS,
    ),
    Family(
        "oomrun_host_memory_limit_bytes", "gauge",
        "Memory that this machine, or this container, may use.",
        _of_host(lambda machine: machine.host.limit_bytes),
    ),
    Family(
        "oomrun_host_memory_used_bytes", "gauge",
        "Memory in use that cannot be had without taking it from a process.",
        _of_host(lambda machine: machine.host.used_bytes),
    ),
    Family(
        "oomrun_host_memory_peak_bytes", "gauge",
        "The most that the cgroup has used, page cache included.",
        _of_host(lambda machine: machine.host.peak_bytes),
    ),
    Family(
        "oomrun_host_memory_pressure_seconds_total", "counter",
        "Time that some or all processes waited for memory.",
        lambda machine: [
            ((kind,), seconds) for kind, seconds in machine.host.pressure_s.items()
        ],
        ("kind",),
    ),
    Family(
        "oomrun_host_oom_kills_total", "counter",
        "Processes of the cgroup that the kernel has killed for memory.",
        _of_host(lambda machine: machine.host.oom_kills),
    ),
    Family(
        "oomrun_collector_success", "gauge",
        "Whether the last reading of a source worked.",
        lambda machine: [
            ((name,), float(one.success)) for name, one in machine.collections.items()
        ],
        ("collector",),
    ),
    Family(
        "oomrun_collector_duration_seconds", "gauge",
        "How long the last reading of a source took.",
        lambda machine: [
            ((name,), one.seconds) for name, one in machine.collections.items()
        ],
        ("collector",),
    ),
)  # fmt: skip
