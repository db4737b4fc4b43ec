"""The metrics of a run's devices: memory, and running out of it.

Covers: CPUs and GPUs alike, under one set of names (docs/decisions/0002). Does not
cover: what NVML knows of a GPU beyond this run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from oomrun.core.state import JobState
from oomrun.core.status import DeviceStatus, devices
from oomrun.core.topology import HOST_ID
from oomrun.metrics.family import Counted, Family, Sample

__all__ = ["DEVICE_FAMILIES", "HOST", "OOM_PHASES", "devices_of"]

OOM_PHASES = (
    "build", "gradients", "apply", "evaluate", "predict", "checkpoint", "unknown",
)  # fmt: skip
#: The ``device`` of an OOM that was the host's.
HOST = HOST_ID
_DEVICE_LABELS = ("rank", "device", "device_kind")


class _Same:
    """A state as a key: the same object is the same, which is all that is needed."""

    def __init__(self, state: JobState) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self.state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.state is self.state


def devices_of(state: JobState) -> list[DeviceStatus]:
    """As ``core.status.devices``, worked out once for all the families of a scrape."""
    return _devices_of(_Same(state))


@lru_cache(maxsize=64)
def _devices_of(same: _Same) -> list[DeviceStatus]:
    return devices(same.state)


def _memory(
    read: Callable[[DeviceStatus], int | None],
) -> Callable[[JobState], Iterable[Sample]]:
    """A reader for a metric with one sample a device."""
    return lambda state: [
        ((str(device.rank), device.id, device.kind), read(device))
        for device in devices_of(state)
    ]


def _gpu_info(state: JobState) -> Iterable[Sample]:
    """Both spellings of the UUID, so that both common GPU exporters join."""
    for device in devices_of(state):
        if device.kind in ("gpu", "mig"):
            bare = device.id.removeprefix("GPU-")
            yield (str(device.rank), device.id, device.id, bare), 1.0


def _oom_events(state: JobState) -> Iterable[Sample]:
    """Every device and phase from 0 on: else ``increase()`` misses the first OOM."""
    ranks = {device.id: str(device.rank) for device in devices_of(state)}
    counts = {(HOST, "host", phase): 0 for phase in OOM_PHASES}
    counts.update(
        {(device, "device", phase): 0 for device in ranks for phase in OOM_PHASES}
    )
    traces = {}
    for (device, kind, phase), count in state.ooms.items():
        key = (HOST if kind == "host" else device, kind, phase)
        counts[key] = counts.get(key, 0) + count
        traces[key] = state.traces.get((device, kind, phase))
    for (device, kind, phase), count in counts.items():
        labels = (ranks.get(device, "0"), device, kind, phase)
        yield labels, Counted(count, traces.get((device, kind, phase)))


DEVICE_FAMILIES: tuple[Family[JobState], ...] = (
    Family(
        "oomrun_gpu_info", "info",
        "A GPU of the run; joins with other exporters by UUID.",
        _gpu_info, ("rank", "device", "UUID", "uuid"),
        lambda state: (state.plan,),
    ),
    Family(
        "oomrun_device_memory_limit_bytes", "gauge",
        "Bytes that the run may use on the device.",
        _memory(lambda d: d.limit_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_budget_bytes", "gauge",
        "Bytes that are planned into: the limit less the headroom kept.",
        _memory(lambda d: d.budget_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_in_use_bytes", "gauge",
        "Bytes allocated by TensorFlow at the last report.",
        _memory(lambda d: d.in_use_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_peak_bytes", "gauge",
        "Highest bytes allocated since the micro-batch last changed.",
        _memory(lambda d: d.window_peak_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_predicted_peak_bytes", "gauge",
        "Peak predicted for the current micro-batch, most likely value.",
        _memory(lambda d: d.predicted_peak_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_predicted_peak_high_bytes", "gauge",
        "Peak predicted for the current micro-batch, upper end of the interval.",
        _memory(lambda d: d.predicted_peak_high_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_device_memory_headroom_bytes", "gauge",
        "Limit less peak: what is left before memory runs out.",
        _memory(lambda d: d.headroom_bytes), _DEVICE_LABELS,
    ),
    Family(
        "oomrun_oom_events_total", "counter",
        "Times that memory ran out, by device, kind (device or host) and phase.",
        _oom_events, ("rank", "device", "kind", "phase"),
        lambda state: (state.ooms, state.traces, state.plan),
    ),
)  # fmt: skip
