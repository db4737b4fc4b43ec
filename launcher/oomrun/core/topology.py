"""The machine as frozen values: devices, host memory, and which of them a job may use.

Covers: what an inventory holds, its JSON form, and the choice that a job file's
``devices`` makes.
Does not cover: reading the machine (``oomrun.devices``), ``CUDA_VISIBLE_DEVICES``
(``oomrun.core.visibility``), or how much of a device a job may fill.

All sizes are bytes. ``None`` means "not known", never "zero".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

DeviceKind = Literal["cpu", "gpu", "mig"]
Wanted = str | Sequence[int | str]

CPU_ID = "cpu:0"
#: Not a device: where memory is told of by device, the host's own.
HOST_ID = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that holds memory of a device; its use is None where NVML hides it."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One reading of a device's memory: total = reserved + used + free.

    ``reserved_bytes`` is what the driver and firmware keep, and is None where the
    driver counts it as used.
    """

    total_bytes: int
    free_bytes: int
    used_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A device whose memory could not be read, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or the CPU, as it was when the inventory was taken.

    Attributes:
        id: ``cpu:0``, or the UUID of the GPU or of the MIG device. A GPU that does not
            even tell its UUID is ``gpu:<NVML index>``.
        index: The NVML index, which is the number that nvidia-smi shows.
        used_by_others_bytes: Memory that processes other than the run's own hold.
        processes: Who holds memory; None where the driver does not tell.
        parent: The UUID of the GPU that a MIG device is a part of.
        problem: Why the device cannot be used, or None.
    """

    id: str
    kind: DeviceKind
    name: str
    index: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    used_by_others_bytes: int | None = None
    processes: tuple[Process, ...] | None = None
    compute_capability: tuple[int, int] | None = None
    pci_bus_id: str | None = None
    nvlinks_active: int = 0
    mig_enabled: bool = False
    parent: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    problem: str | None = None

    @property
    def usable(self) -> bool:
        """Whether a job can run on it."""
        return self.problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """Two GPUs that NVLink joins, by their ids.

    ``links`` counts direct links, or through a switch the links of the GPU that has
    fewer of them.
    """

    first: str
    second: str
    links: int
    through_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host's memory, as this process may use it.

    Attributes:
        cgroup_limit_bytes: The smallest limit on the way up the cgroup tree.
        cgroup_used_bytes: What the group with that limit uses, page cache included.
        cgroup_free_bytes: What is left under the tightest limit once the kernel has
            dropped page cache that nobody uses at the moment.
        oom_kill_count: Processes of this cgroup that the kernel has killed for memory.
    """

    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_version: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_free_bytes: int | None = None
    oom_kill_count: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    cpu_count: int = 1

    @property
    def limit_bytes(self) -> int:
        """The most that the processes of this cgroup can ever hold."""
        if self.cgroup_limit_bytes is None:
            return self.memory_total_bytes
        return min(self.memory_total_bytes, self.cgroup_limit_bytes)

    @property
    def free_bytes(self) -> int:
        """What they can still take now."""
        if self.cgroup_free_bytes is None:
            return self.memory_available_bytes
        return min(self.memory_available_bytes, self.cgroup_free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All devices, GPUs first, and what could not be read, in words for people."""

    devices: tuple[Device, ...]
    host: Host
    problems: tuple[str, ...] = ()
    driver_version: str | None = None
    nvlinks: tuple[NvLink, ...] = ()


class SelectionError(ValueError):
    """The job asks for devices that the machine does not have, or not for this.

    Attributes:
        reason: What is wrong.
        existing: The devices that could have been named, each in a few words.
    """

    def __init__(self, reason: str, existing: Sequence[str]) -> None:
        self.reason = reason
        self.existing = tuple(existing)
        super().__init__(f"{reason}; there is: {', '.join(existing) or 'no device'}")


def to_json(inventory: Inventory) -> dict[str, Any]:
    """The inventory as JSON-ready values, with each device's number in ``devices:``."""
    document: dict[str, Any] = _plain(asdict(inventory))
    numbers = {device.id: n for n, device in enumerate(numbered(inventory))}
    for device in document["devices"]:
        device["number"] = numbers.get(device["id"])
    document["host"]["limit_bytes"] = inventory.host.limit_bytes
    document["host"]["free_bytes"] = inventory.host.free_bytes
    return document


def from_json(document: Mapping[str, Any]) -> Inventory:
    """Reads back what a plan is made of: devices and host, without who uses them.

    Raises:
        ValueError, TypeError, KeyError: it is no inventory.
    """
    known = {field.name for field in fields(Device)} - {"processes"}
    devices = []
    for each in document["devices"]:
        told = {key: value for key, value in each.items() if key in known}
        if told.get("compute_capability") is not None:
            told["compute_capability"] = tuple(told["compute_capability"])
        devices.append(Device(**told))
    names = {field.name for field in fields(Host)}
    host = {key: value for key, value in document["host"].items() if key in names}
    return Inventory(devices=tuple(devices), host=Host(**host))


def _plain(value: Any) -> Any:
    """The value with lists for tuples, as it looks after a trip through JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def numbered(inventory: Inventory) -> tuple[Device, ...]:
    """The accelerators in the order in which a job file numbers them, from 0.

    As in any CUDA program, the numbers count what is visible. MIG devices count only
    where their GPU is hidden, so that 1 stays the second GPU on a machine with MIG.
    """
    ids = {device.id for device in inventory.devices}
    return tuple(
        device
        for device in inventory.devices
        if device.kind == "gpu" or (device.kind == "mig" and device.parent not in ids)
    )


def select(inventory: Inventory, wanted: Wanted) -> tuple[Device, ...]:
    """The devices that a job with this ``devices`` setting runs on, never none.

    ``auto`` is what ``gpu`` gives, or the CPU where no GPU is usable. ``gpu`` is all
    usable GPUs, or where all are in MIG mode the MIG device with most free memory: CUDA
    shows a process only one, and they cannot talk to each other. A list has numbers as
    in ``numbered`` and ids or unique beginnings of ids.

    Raises:
        SelectionError: Something wanted does not exist or cannot be used.
    """
    if isinstance(wanted, str):
        return _of_kind(inventory, wanted)
    chosen: list[Device] = []
    for name in wanted:
        device = _pick(inventory, name)
        if device in chosen:
            raise SelectionError(f"{device.id} is named twice", _existing(inventory))
        chosen.append(device)
    if not chosen:
        raise SelectionError("the list of devices is empty", _existing(inventory))
    if len({device.kind == "cpu" for device in chosen}) > 1:
        raise SelectionError("one job cannot mix CPU and GPU", _existing(inventory))
    return tuple(chosen)


def cpu(device: Device, index: int) -> Device:
    """The CPU as the ``index``-th of several devices."""
    return replace(device, id=f"cpu:{index}", index=index)


def fits_one_process(devices: Sequence[Device]) -> bool:
    """Whether one process can use them all: CUDA shows it one MIG device, alone."""
    return len(devices) <= 1 or all(device.kind != "mig" for device in devices)


def _of_kind(inventory: Inventory, wanted: str) -> tuple[Device, ...]:
    if wanted not in ("auto", "gpu", "cpu"):
        raise SelectionError(
            f"devices: {wanted!r} is not auto, gpu, cpu or a list", _existing(inventory)
        )
    usable = [device for device in inventory.devices if device.usable]
    gpus = [device for device in usable if device.kind == "gpu"]
    migs = [device for device in usable if device.kind == "mig"]
    chosen = gpus or sorted(migs, key=lambda mig: -(mig.free_bytes or 0))[:1]
    if wanted == "cpu" or (wanted == "auto" and not chosen):
        chosen = [device for device in usable if device.kind == "cpu"]
    if not chosen:
        what = "GPU" if wanted == "gpu" else "device"
        why = f" ({'; '.join(inventory.problems)})" if inventory.problems else ""
        raise SelectionError(f"there is no usable {what}{why}", _existing(inventory))
    return tuple(chosen)


def _pick(inventory: Inventory, name: int | str) -> Device:
    if isinstance(name, int):
        devices = numbered(inventory)
        found = list(devices[name : name + 1]) if name >= 0 else []
    else:
        # The exact id first: gpu:1 is also the beginning of gpu:10.
        found = [d for d in inventory.devices if d.id == name] or [
            d for d in inventory.devices if name and d.id.startswith(name)
        ]
    if len(found) != 1:
        count = f"fits {len(found)} devices" if found else "does not exist"
        raise SelectionError(f"device {name} {count}", _existing(inventory))
    if found[0].problem is not None:
        raise SelectionError(
            f"device {name} cannot be used: {found[0].problem}", _existing(inventory)
        )
    return found[0]


def _existing(inventory: Inventory) -> list[str]:
    numbers = {device.id: n for n, device in enumerate(numbered(inventory))}
    return [
        f"{numbers[device.id]} = {device.id}" if device.id in numbers else device.id
        for device in inventory.devices
    ]
