"""How much memory a GPU must have, so that the plan made on it is one that fits.

Covers: ``gpu_need``, which asks the planner itself for smaller and smaller GPUs. Does
not cover: what is known of the step (``core.events.StateMeasured``).
"""

from __future__ import annotations

from collections.abc import Callable

from oomrun.core.breakdown import known_from_graph
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.events import StateMeasured
from oomrun.core.measured_plan import plan_elsewhere
from oomrun.core.plan import DevicePlan
from oomrun.core.spec import JobSpec
from oomrun.core.topology import Host
from oomrun.kubernetes.submission import GpuNeed

__all__ = ["gpu_need"]

_MIB = 2**20
_LARGEST_MIB = 2**20  # a TiB; there is no such GPU
# It does not count, as the GPU is planned for and not the host.
_NO_HOST = Host(memory_total_bytes=0, memory_available_bytes=0)


def gpu_need(spec: JobSpec, seen: StateMeasured) -> GpuNeed | None:
    """What a run's worker has found out of its step, as memory of a GPU.

    Args:
        spec: what the user wrote.
        seen: what a run of the job has measured, on whatever device.

    Returns:
        None where the step tells nothing, or more is needed than any GPU has.
    """
    if not known_from_graph(seen).static:
        return None
    least = _smallest(spec, seen, lambda device: True)
    whole = _smallest(spec, seen, lambda device: device.accumulation_steps == 1)
    if least is None:
        return None
    return GpuNeed(least_bytes=least, whole_bytes=whole)


def _smallest(
    spec: JobSpec, seen: StateMeasured, good: Callable[[DevicePlan], bool]
) -> int | None:
    """Bytes of the smallest GPU, to a MiB, whose plan is a good one."""

    def fits(mib: int) -> bool:
        try:
            made = plan_elsewhere(spec, _NO_HOST, mib * _MIB, seen)
        except InfeasiblePlanError:
            return False
        return good(made.devices[0])

    if not fits(_LARGEST_MIB):
        return None
    low, high = 0, _LARGEST_MIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * _MIB
