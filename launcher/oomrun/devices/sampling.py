"""The machine read once a second, for those who watch it.

Covers: one reading, and a thread that repeats it while somebody asks (``Sampling``).
Does not cover: what the readings are called (``oomrun.metrics``).

NVML may hang in any call. Here it does so in a thread of its own, so that a scrape is
never held up; and not through ``nvml.within``, whose verdict that the driver hangs
would hit those who start an attempt at that moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from oomrun import host
from oomrun.core.machine import Collection, GpuReading, HostReading, MachineReading
from oomrun.core.topology import Memory
from oomrun.devices import gpu, nvml
from oomrun.devices.nvml import ask

__all__ = ["Sampling", "read_host"]

_EVERY_S = 1.0
_IDLE_AFTER_S = 60.0
#: How old a reading may be: then the driver hangs.
_STALE_S = 10.0
#: How often it is asked which GPUs and parts of GPUs there are.
_LIST_EVERY_S = 60.0
_TRY_AGAIN_S = 60.0
_LIBRARY_NOT_FOUND = 12
_NVML_TEMPERATURE_GPU = 0


class Sampling:
    """What the machine tells now; GPUs as of the last second.

    Nobody asks for a minute: GPUs are not read. The driver hangs or fails: they are not
    there, and ``collections`` says so. There is no driver: neither.
    """

    def __init__(self, root: Path = Path("/"), *, patience_s: float = _EVERY_S) -> None:
        """Reads nothing yet.

        Args:
            root: where /proc and /sys are found.
            patience_s: how long the first answer waits for the driver.
        """
        self._root, self._patience_s = root, patience_s
        self._closing = threading.Event()
        self._asked, self._fresh = threading.Event(), threading.Event()
        self._asked_at = time.monotonic()
        self._last = _Gpus()
        self._waited_in_vain = False
        self._thread = threading.Thread(
            target=self._keep_reading, name="oomrun-sampling", daemon=True
        )

    def __enter__(self) -> Sampling:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._asked.set()
        # A driver that hangs must not keep the run from its end.
        self._thread.join(_EVERY_S)

    def __call__(self) -> MachineReading:
        """Never raises; waits for the first reading alone, and not for long."""
        self._ask()
        began = time.perf_counter()
        this_host = read_host(self._root)
        took = Collection(success=True, seconds=time.perf_counter() - began)
        last = self._last
        if last.missing:
            return MachineReading(host=this_host, collections={"host": took})
        fresh = time.monotonic() - last.at <= _STALE_S
        success = last.success and fresh
        return MachineReading(
            host=this_host,
            gpus=last.gpus if success else (),
            driver_version=last.driver_version,
            collections={
                "host": took,
                "nvml": Collection(success=success, seconds=last.seconds),
            },
        )

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > _IDLE_AFTER_S:
            self._fresh.clear()
        self._asked_at = now
        self._asked.set()
        if not self._waited_in_vain:
            self._waited_in_vain = not self._fresh.wait(self._patience_s)

    def _keep_reading(self) -> None:
        while not self._closing.is_set():
            try:
                with nvml.session() as door:
                    self._read_while_asked(door)
            except nvml.NvmlUnavailableError as error:
                number = getattr(error.__cause__, "value", None)
                self._keep(_Gpus(missing=number == _LIBRARY_NOT_FOUND))
                self._closing.wait(_TRY_AGAIN_S)

    def _read_while_asked(self, door: Any) -> None:
        listed, listed_at = _list(door), time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() - listed_at > _LIST_EVERY_S:
                listed, listed_at = _list(door), time.monotonic()
            found = _read(door, listed)
            self._keep(found)
            self._closing.wait(_EVERY_S)
            if not found.success:
                return  # perhaps it needs to be opened anew
            self._asked.clear()
            if time.monotonic() - self._asked_at > _IDLE_AFTER_S:
                self._asked.wait()

    def _keep(self, found: _Gpus) -> None:
        self._last = found
        self._waited_in_vain = False
        self._fresh.set()


class _Gpus:
    """One reading of all GPUs."""

    def __init__(
        self,
        gpus: tuple[GpuReading, ...] = (),
        driver_version: str = "",
        *,
        success: bool = False,
        seconds: float = 0.0,
        missing: bool = False,
    ) -> None:
        self.gpus, self.driver_version = gpus, driver_version
        self.success, self.seconds, self.missing = success, seconds, missing
        self.at = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Listed:
    """The GPUs and their parts by handle, with what does not change."""

    driver_version: str = ""
    found: tuple[tuple[Any, GpuReading], ...] = ()
    whole: bool = False


def _list(door: Any) -> _Listed:
    count = ask(door, "DeviceGetCount")
    handles = [ask(door, "DeviceGetHandleByIndex", n) for n in range(count or 0)]
    found = [one for handle in handles if handle for one in _parts(door, handle)]
    gpus = sum(reading.kind == "gpu" for _, reading in found)
    return _Listed(
        driver_version=ask(door, "SystemGetDriverVersion") or "",
        found=tuple(found),
        whole=count is not None and gpus == count,
    )


def _parts(door: Any, handle: Any) -> Iterator[tuple[Any, GpuReading]]:
    uuid = ask(door, "DeviceGetUUID", handle)
    if uuid is None:
        return
    model = _name(door, handle)
    yield handle, GpuReading(id=uuid, kind="gpu", model=model, gpu_uuid=uuid)
    mode, _ = ask(door, "DeviceGetMigMode", handle) or (0, 0)
    for slot in range(gpu.mig_slots(door, handle) if mode == 1 else 0):
        part = ask(door, "DeviceGetMigDeviceHandleByIndex", handle, slot)
        own = part and ask(door, "DeviceGetUUID", part)
        if own:
            number = ask(door, "DeviceGetGpuInstanceId", part)
            known = GpuReading(
                id=own, kind="mig", model=_name(door, part), gpu_uuid=uuid,
                gpu_instance_id="" if number is None else str(number),
            )  # fmt: skip
            yield part, known


def _name(door: Any, handle: Any) -> str:
    return ask(door, "DeviceGetName", handle) or "unknown GPU"


def _read(door: Any, listed: _Listed) -> _Gpus:
    began = time.perf_counter()
    gpus = tuple(_reading(door, handle, known) for handle, known in listed.found)
    # What a GPU's driver always tells; without it the GPU is lost.
    lost = [one for one in gpus if one.kind == "gpu" and one.total_bytes is None]
    return _Gpus(
        gpus,
        listed.driver_version,
        success=listed.whole and not lost,
        seconds=time.perf_counter() - began,
    )


def _reading(door: Any, handle: Any, known: GpuReading) -> GpuReading:
    memory: Memory | None = None
    with contextlib.suppress(Exception):  # whatever NVML finds wrong with this one
        memory = gpu.memory_by_handle(door, handle)
    used = ask(door, "DeviceGetUtilizationRates", handle)
    milliwatts = ask(door, "DeviceGetPowerUsage", handle)
    return replace(
        known,
        total_bytes=None if memory is None else memory.total_bytes,
        used_bytes=None if memory is None else memory.used_bytes,
        utilization=None if used is None else used.gpu / 100,
        temperature_c=ask(door, "DeviceGetTemperature", handle, _NVML_TEMPERATURE_GPU),
        power_w=None if milliwatts is None else milliwatts / 1000,
    )


def read_host(root: Path = Path("/")) -> HostReading:
    """The host's memory as this process may use it.

    Args:
        root: where /proc and /sys are found.
    """
    found = host.read(root)
    return HostReading(
        limit_bytes=found.limit_bytes,
        used_bytes=max(0, found.limit_bytes - found.free_bytes),
        peak_bytes=host.peak_bytes(root),
        pressure_s=host.pressure_s(root),
        oom_kills=found.oom_kill_count,
    )
