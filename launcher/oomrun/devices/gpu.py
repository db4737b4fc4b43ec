"""GPUs and MIG devices as NVML tells of them.

Covers: one full reading of all of them (``read``), and the memory of one
(``memory_of``). Any NVML call may fail on its own; what fails costs that one fact, and
only a GPU without a memory reading is called unusable.
Does not cover: which GPUs may be used (``oomrun.core.visibility``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from oomrun.core.topology import Device, Memory, NvLink, Process
from oomrun.devices import nvlink, nvml
from oomrun.devices.nvml import ask

_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_NO_GPU = (
    "the NVIDIA driver answers, but shows no GPU (a container must be given its GPUs)"
)
_MAX_MIG_DEVICES = 7  # of any card so far
_EMPTY_SLOT = (2, 6)  # NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND
_IN_MIG_MODE = "it is in MIG mode: only its MIG devices can be used"
_NO_MIG_DEVICES = (
    "MIG mode is on, but it has no MIG devices: make some (nvidia-smi mig -cgi …) or "
    "turn MIG mode off"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All GPUs and MIG devices: a GPU's MIG devices follow it."""

    devices: tuple[Device, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    driver_version: str | None = None
    problems: tuple[str, ...] = ()


def read(timeout_s: float, own_pids: frozenset[int] = frozenset()) -> Reading:
    """All GPUs, or none and the reason; never raises, never takes much longer.

    Args:
        timeout_s: How long the driver may take.
        own_pids: Processes of this run, whose memory is not "used by others".
    """
    try:
        return nvml.within(timeout_s, lambda: _read(own_pids))
    except nvml.NvmlUnavailableError as error:
        return Reading(problems=(str(error),))
    except Exception as error:  # a half-installed driver fails in its own ways
        return Reading(problems=(f"GPUs could not be read: {nvml.words(error)}",))


def memory_of(uuid: str) -> Memory:
    """The memory of a GPU or a MIG device now. Not bounded in time: see ``nvml``.

    Raises:
        NvmlUnavailableError: There is no NVML to ask.
        Exception: Whatever pynvml raises for this device; ``nvml.words`` explains it.
    """
    with nvml.session() as pynvml:
        return memory_by_handle(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))


def _read(own_pids: frozenset[int]) -> Reading:
    with nvml.session() as pynvml:
        devices: list[Device] = []
        links: dict[str, list[str | None]] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            except Exception as error:
                devices.append(_lost(index, error))
                continue
            gpu = _device(pynvml, handle, index, own_pids)
            links[gpu.id] = nvlink.linked_buses(pynvml, handle)
            gpu = replace(gpu, nvlinks_active=len(links[gpu.id]))
            migs, problem = _mig_devices(pynvml, handle, gpu, own_pids)
            devices += [replace(gpu, problem=problem), *migs]
        if not devices:
            return Reading(
                driver_version=ask(pynvml, "SystemGetDriverVersion"),
                problems=(_NO_GPU,),
            )
        return Reading(
            devices=tuple(devices),
            nvlinks=nvlink.pairs(devices, links),
            driver_version=ask(pynvml, "SystemGetDriverVersion"),
            problems=tuple(
                f"{_title(device)}: {device.problem}"
                for device in devices
                if device.problem not in (None, _IN_MIG_MODE)
            ),
        )


def _title(device: Device) -> str:
    if device.kind == "mig":
        return f"MIG device {device.id}"
    return f"GPU {device.index} ({device.name})"


def _lost(index: int, error: Exception) -> Device:
    return Device(
        id=f"gpu:{index}",
        kind="gpu",
        name="unknown GPU",
        index=index,
        problem=nvml.words(error),
    )


def _device(
    pynvml: Any, handle: Any, index: int, own_pids: frozenset[int], parent: str = ""
) -> Device:
    """A GPU, or with ``parent`` a MIG device of that GPU."""
    memory: Memory | None = None
    problem: str | None = None
    try:
        uuid: str | None = pynvml.nvmlDeviceGetUUID(handle)
    except Exception as error:
        uuid, problem = None, f"it does not tell its UUID: {nvml.words(error)}"
    try:
        memory = memory_by_handle(pynvml, handle)
    except Exception as error:
        problem = f"its memory cannot be read: {nvml.words(error)}"
    processes = _processes(pynvml, handle)
    mig_mode, _ = ask(pynvml, "DeviceGetMigMode", handle) or (0, 0)
    mig_enabled = not parent and mig_mode == 1
    if mig_enabled:
        problem = _IN_MIG_MODE
    device = Device(
        id=uuid or f"gpu:{index}",
        kind="mig" if parent else "gpu",
        name=ask(pynvml, "DeviceGetName", handle) or "unknown GPU",
        index=index,
        processes=processes,
        used_by_others_bytes=_used_by_others(memory, processes, own_pids),
        compute_capability=ask(pynvml, "DeviceGetCudaComputeCapability", handle),
        pci_bus_id=nvlink.bus(ask(pynvml, "DeviceGetPciInfo", handle)),
        mig_enabled=mig_enabled,
        problem=problem,
    )
    if memory is None:
        return device
    return replace(
        device,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        used_bytes=memory.used_bytes,
        reserved_bytes=memory.reserved_bytes,
    )


def memory_by_handle(pynvml: Any, handle: Any) -> Memory:
    """The memory, by the call that tells reserved from used where the driver has it."""
    try:
        new = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except Exception:
        # Drivers before 510 lack it and some refuse it for MIG devices. If the device
        # itself is at fault, the old call fails too, and its error is the one to show.
        old = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Memory(
            total_bytes=int(old.total),
            free_bytes=int(old.free),
            used_bytes=int(old.used),
        )
    return Memory(
        total_bytes=int(new.total),
        free_bytes=int(new.free),
        used_bytes=int(new.used),
        reserved_bytes=int(new.reserved),
    )


def _processes(pynvml: Any, handle: Any) -> tuple[Process, ...] | None:
    """The processes on a device by pid, or None where the driver lists none of them.

    In a container NVML shows the host's pids, or nobody at all.
    """
    used_bytes: dict[int, int | None] = {}
    answered = False
    for kind in ("Compute", "Graphics", "MPSCompute"):
        found = ask(pynvml, f"DeviceGet{kind}RunningProcesses", handle)
        answered = answered or found is not None
        for process in found or []:
            used = process.usedGpuMemory
            # One process may be in several lists, each time with all that it holds.
            if used_bytes.get(process.pid) is None:
                known = used is not None and used != _NOT_AVAILABLE
                used_bytes[process.pid] = int(used) if known else None
    if not answered:
        return None
    return tuple(
        Process(
            pid=pid,
            name=ask(pynvml, "SystemGetProcessName", pid) or None,
            used_bytes=used,
        )
        for pid, used in sorted(used_bytes.items())
    )


def _used_by_others(
    memory: Memory | None,
    processes: tuple[Process, ...] | None,
    own_pids: frozenset[int],
) -> int | None:
    """What is in use less what our own hold; None where that cannot be told.

    Not the sum of the others' entries: processes in other containers are not listed,
    but the memory they hold is missing all the same.
    """
    if memory is None:
        return None
    if not own_pids:
        return memory.used_bytes
    if processes is None:
        return None
    own = [process.used_bytes for process in processes if process.pid in own_pids]
    known = [used for used in own if used is not None]
    return None if len(known) < len(own) else max(0, memory.used_bytes - sum(known))


def _mig_devices(
    pynvml: Any, handle: Any, gpu: Device, own_pids: frozenset[int]
) -> tuple[list[Device], str | None]:
    """A GPU's MIG devices, and what is wrong with the GPU now that they are known."""
    found: list[Device] = []
    if not gpu.mig_enabled:
        return found, gpu.problem
    unread = ""
    for slot in range(mig_slots(pynvml, handle)):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except Exception as error:
            # The slots need not be filled, nor filled from the front.
            if getattr(error, "value", None) not in _EMPTY_SLOT:
                unread = f", but that in slot {slot} cannot be read: "
                unread += nvml.words(error)
            continue
        device = _device(pynvml, mig, gpu.index or 0, own_pids, parent=gpu.id)
        found.append(
            replace(
                device,
                id=device.id if device.id.startswith("MIG-") else f"{gpu.id}/mig{slot}",
                parent=gpu.id,
                compute_capability=device.compute_capability or gpu.compute_capability,
                pci_bus_id=gpu.pci_bus_id,
                gpu_instance_id=ask(pynvml, "DeviceGetGpuInstanceId", mig),
                compute_instance_id=ask(pynvml, "DeviceGetComputeInstanceId", mig),
            )
        )
    if not found and not unread:
        return found, _NO_MIG_DEVICES
    return found, _IN_MIG_MODE + unread


def mig_slots(pynvml: Any, handle: Any) -> int:
    """How many MIG devices a GPU may have; where the driver does not tell, the most."""
    slots = ask(pynvml, "DeviceGetMaxMigDeviceCount", handle)
    return _MAX_MIG_DEVICES if slots is None else int(slots)
