"""What the machine itself tells those who watch: its GPUs and the host's memory, now.

Covers: one reading as frozen values. Does not cover: taking it (``oomrun.devices``),
what a run has of a device (``status.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Collection", "GpuReading", "HostReading", "MachineReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """A GPU or a MIG device; None where the driver does not tell.

    Attributes:
        id: its own UUID, as in a plan.
        gpu_uuid: of the GPU that it is, or is a part of.
        gpu_instance_id: of a MIG device, else "".
        used_bytes: by all processes.
        utilization: the share of time in which something ran on it, 0 to 1.
    """

    id: str
    kind: str
    model: str
    gpu_uuid: str
    gpu_instance_id: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The host's memory, as this process's cgroup may use it; None if not told.

    Attributes:
        peak_bytes: the most that the cgroup has used.
        pressure_s: how long some or all processes waited for memory so far.
        oom_kills: processes of the cgroup that the kernel killed for memory.
    """

    limit_bytes: int
    used_bytes: int
    peak_bytes: int | None = None
    pressure_s: Mapping[str, float] = field(default_factory=dict)
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """How reading one source went."""

    success: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """The machine at one moment."""

    host: HostReading
    gpus: tuple[GpuReading, ...] = ()
    driver_version: str = ""
    collections: Mapping[str, Collection] = field(default_factory=dict)
