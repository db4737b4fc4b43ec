"""What the machine has: GPUs through NVML, the CPU, and the host's memory.

Covers: one inventory of it all (``discover``), the memory of one device just before a
start (``memory_of``), and waiting for a dead process's memory (``wait_until_free``).
Does not cover: which of it a job uses (``oomrun.core.topology``) or how much of it.

The driver may be missing, broken or hanging, and devices may vanish: all of that comes
back as words in the values, never as an exception, and within a bounded time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oomrun import host
from oomrun.core.topology import CPU_ID, Inventory, Memory, Unreadable
from oomrun.core.visibility import visible
from oomrun.devices import gpu, nvml
from oomrun.devices.nvml import held_open

__all__ = [
    "DISCOVERY_TIMEOUT_S",
    "READING_TIMEOUT_S",
    "Wait",
    "discover",
    "held_open",
    "memory_of",
    "wait_until_free",
]

# A machine of eight GPUs that nothing keeps awake takes over ten seconds to open.
DISCOVERY_TIMEOUT_S = 30.0
READING_TIMEOUT_S = 15.0

# Readings that fail in a row before waiting for them has no point any more.
_FAILURES_IN_A_ROW = 3


def discover(
    environment: Mapping[str, str],
    *,
    root: Path = Path("/"),
    timeout_s: float = DISCOVERY_TIMEOUT_S,
    own_pids: frozenset[int] = frozenset(),
) -> Inventory:
    """The devices that CUDA_VISIBLE_DEVICES leaves visible, and the host.

    Args:
        environment: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up.
        root: Where /proc, /sys and /dev are found.
        timeout_s: How long the NVIDIA driver may take.
        own_pids: Processes of this run, whose memory is not "used by others".
    """
    reading = gpu.read(timeout_s, own_pids)
    this_host = host.read(root)
    inventory = Inventory(
        devices=(*reading.devices, host.cpu(this_host, root)),
        host=this_host,
        problems=reading.problems,
        driver_version=reading.driver_version,
        nvlinks=reading.nvlinks,
    )
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    note = _order_note(inventory, wanted, environment.get("CUDA_DEVICE_ORDER"))
    inventory = visible(inventory, wanted)
    return replace(inventory, problems=inventory.problems + note)


def _order_note(
    inventory: Inventory, wanted: str | None, order: str | None
) -> tuple[str, ...]:
    """A note where CUDA alone would number the GPUs in another order than we do."""
    names = {
        device.name
        for device in inventory.devices
        if device.kind == "gpu" and device.pci_bus_id is not None
    }
    by_number = wanted is not None and re.match(r"\s*\+?\d", wanted)
    if not by_number or len(names) < 2 or order == "PCI_BUS_ID":
        return ()
    return (
        f'CUDA_VISIBLE_DEVICES="{wanted}" is read in PCI bus order, as nvidia-smi '
        "numbers the GPUs; without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA would count the "
        "fastest GPU first. UUIDs mean the same to all",
    )


def memory_of(
    device_id: str,
    *,
    root: Path = Path("/"),
    timeout_s: float = READING_TIMEOUT_S,
) -> Memory | Unreadable:
    """The memory of one device now, to be read just before each start.

    Args:
        device_id: The full id of a device: ``cpu:0`` or a UUID.
        root: Where /proc and /sys are found.
        timeout_s: How long the NVIDIA driver may take.
    """
    if device_id == CPU_ID:
        return host.cpu_memory(host.read(root))
    try:
        return nvml.within(timeout_s, lambda: gpu.memory_of(device_id))
    except nvml.NvmlUnavailableError as error:
        return Unreadable(reason=str(error))
    except Exception as error:  # whatever NVML finds wrong with this device
        return Unreadable(reason=f"{device_id}: {nvml.words(error)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How waiting for free memory ended.

    Attributes:
        reached: Whether the wanted bytes are free.
        memory: The last reading.
        waited_s: How long it took.
    """

    reached: bool
    memory: Memory | Unreadable
    waited_s: float


def wait_until_free(
    device_id: str,
    wanted_bytes: int,
    *,
    timeout_s: float,
    poll_s: float = 0.1,
    root: Path = Path("/"),
) -> Wait:
    """Waits until a device has that much free: a dead process's memory comes back late.

    Ends early when the device cannot be read any more. The driver can add one reading's
    time to ``timeout_s``.
    """
    started = time.monotonic()
    failures = 0
    with held_open(READING_TIMEOUT_S):
        while True:
            memory = memory_of(device_id, root=root)
            waited_s = time.monotonic() - started
            failures = failures + 1 if isinstance(memory, Unreadable) else 0
            reached = isinstance(memory, Memory) and memory.free_bytes >= wanted_bytes
            if reached or failures >= _FAILURES_IN_A_ROW or waited_s >= timeout_s:
                return Wait(reached=reached, memory=memory, waited_s=waited_s)
            time.sleep(max(0.0, min(poll_s, timeout_s - waited_s)))
