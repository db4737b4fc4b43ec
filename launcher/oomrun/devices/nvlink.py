"""NVLink: which GPUs it joins, directly or through switches.

Covers: NVML's per-link answers and what pairs of GPUs they mean.
Does not cover: speed, errors or topology over PCI; a plan only asks "joined or not".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oomrun.core.topology import Device, NvLink
from oomrun.devices.nvml import ask

_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS, which older pynvml releases have as 18


def bus(pci: Any) -> str | None:
    """The PCI bus id in one spelling, as NVML varies the case and the domain's width.

    Args:
        pci: NVML's answer about a PCI device, or None where it gave none.
    """
    raw = getattr(pci, "busId", b"")
    text = (raw.decode(errors="replace") if isinstance(raw, bytes) else raw).lower()
    domain, colon, rest = text.partition(":")
    return f"{domain.zfill(8)}:{rest}" if colon else None


def linked_buses(pynvml: Any, handle: Any) -> list[str | None]:
    """Per active NVLink the bus of what is at its other end, or None for a switch."""
    buses: list[str | None] = []
    for link in range(_MAX_LINKS):
        active = ask(pynvml, "DeviceGetNvLinkState", handle, link)
        if active is None:
            break  # no NVLink, or no more of them
        if active:
            kind = ask(pynvml, "DeviceGetNvLinkRemoteDeviceType", handle, link)
            far = bus(ask(pynvml, "DeviceGetNvLinkRemotePciInfo", handle, link))
            buses.append(None if kind == _SWITCH else far or "unknown")
    return buses


def pairs(
    devices: Sequence[Device], links: Mapping[str, Sequence[str | None]]
) -> tuple[NvLink, ...]:
    """The pairs of GPUs that NVLink joins.

    All switches of a machine form one fabric, so any two GPUs with links into it meet.

    Args:
        devices: The machine's devices.
        links: Per GPU id what ``linked_buses`` gave.
    """
    gpus = [device for device in devices if device.id in links]
    found: list[NvLink] = []
    for n, first in enumerate(gpus):
        for second in gpus[n + 1 :]:
            direct = links[first.id].count(second.pci_bus_id or "")
            switched = min(links[gpu.id].count(None) for gpu in (first, second))
            if direct or switched:
                found.append(
                    NvLink(
                        first=first.id,
                        second=second.id,
                        links=direct or switched,
                        through_switch=not direct,
                    )
                )
    return tuple(found)
