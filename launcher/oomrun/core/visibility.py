"""CUDA_VISIBLE_DEVICES: which GPUs the surroundings let a job use.

Schedulers, containers and people set it, in several forms whose rules CUDA applies
without a word. Here the same rules come with words. What NVIDIA does not document
(repeats, words after a number, mixed forms) was tried on a real driver
(``docs/gpu-check.md``).
Does not cover: what the job asks for among the visible (``topology.select``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from oomrun.core.topology import Device, Inventory

# The form of MIG names before driver 470, which CUDA still reads:
# MIG-<GPU UUID>/<GPU instance>/<compute instance>.
_OLD_MIG_NAME = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")
# What CUDA reads of a GPU's UUID: any text behind it is passed over.
_GPU_UUID = re.compile(r"GPU-[0-9a-fA-F-]+")
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")


def visible(inventory: Inventory, cuda_visible_devices: str | None) -> Inventory:
    """The inventory as CUDA_VISIBLE_DEVICES lets oomrun use it, in that order.

    None is "not set": everything. The rules are CUDA's: the first entry says whether
    all are numbers, GPU UUIDs or MIG names; UUIDs may be cut short while they stay
    unique; the first entry that is no device ends the list; naming a device twice hides
    all. Numbers count GPUs by PCI bus, since oomrun sets CUDA_DEVICE_ORDER=PCI_BUS_ID.
    Whatever hides a GPU that the machine has is said in ``problems``.

    A visible GPU in MIG mode brings its MIG devices along: CUDA would show a process
    the first of them only, but oomrun can give each of its processes another.
    """
    if cuda_visible_devices is None or not any(
        device.kind != "cpu" for device in inventory.devices
    ):
        return inventory
    chosen, note = _chosen(inventory.devices, cuda_visible_devices)
    shown: list[Device] = []
    for device in chosen:
        parts = [part for part in inventory.devices if part.parent == device.id]
        shown += [device, *parts]
    ids = {device.id for device in shown}
    if note is None and not shown:
        note = "hides every GPU"
    problems = inventory.problems
    if note is not None:
        problems += (f'CUDA_VISIBLE_DEVICES="{cuda_visible_devices}" {note}',)
    cpus = [device for device in inventory.devices if device.kind == "cpu"]
    return replace(
        inventory,
        devices=(*shown, *cpus),
        problems=problems,
        nvlinks=tuple(n for n in inventory.nvlinks if {n.first, n.second} <= ids),
    )


def _chosen(devices: Sequence[Device], text: str) -> tuple[list[Device], str | None]:
    """The accelerators that the text names, and what is odd about it."""
    entries, note = _entries(text)
    chosen: list[Device] = []
    for entry in entries:
        found = _named(devices, entry)
        if len(found) != 1:
            what = f"names {entry}, which " + (
                f"fits {len(found)} devices" if found else "is not on this machine"
            )
            return chosen, f"{what}: CUDA ignores it and all that follows"
        if found[0] in chosen:
            return [], f"names {found[0].id} twice: CUDA then sees no GPU at all"
        chosen += found
    return chosen, note


def _entries(text: str) -> tuple[list[int | str], str | None]:
    """The entries up to the first that CUDA does not read, and a note about it."""
    prefix = next((form for form in ("GPU-", "MIG-") if text.startswith(form)), None)
    entries: list[int | str] = []
    for word in text.split(","):
        entry = _number(word) if prefix is None else word
        if entry is None or (prefix and not word.startswith(prefix)):
            # "", "-1", "none" and the like are ways to say "no GPU"; in the middle of
            # a list the same words are more likely a mistake.
            stops = f'has "{word}": CUDA ignores it and all that follows'
            return entries, stops if entries else None
        entries.append(entry)
    return entries, None


def _number(word: str) -> int | None:
    """The number that C's strtol reads at the start of the word; None below zero."""
    match = _LEADING_NUMBER.match(word)
    if match is None or int(match[1]) < 0:
        return None
    return int(match[1])


def _named(devices: Sequence[Device], entry: int | str) -> list[Device]:
    """The accelerators that one entry can mean; exactly one if the entry is good."""
    gpus = [device for device in devices if device.kind == "gpu"]
    if isinstance(entry, int):
        if all(device.pci_bus_id is not None for device in gpus):
            gpus.sort(key=lambda device: device.pci_bus_id or "")
        return gpus[entry : entry + 1]
    if (uuid := _GPU_UUID.match(entry)) is not None:
        return [gpu for gpu in gpus if gpu.id.lower().startswith(uuid[0].lower())]
    old = _OLD_MIG_NAME.fullmatch(entry)
    return [
        device
        for device in devices
        if (device.kind == "mig" and entry != "MIG-" and device.id.startswith(entry))
        or (
            old is not None
            and device.parent == old[1]
            and device.gpu_instance_id == int(old[2])
            and device.compute_instance_id == int(old[3])
        )
    ]
