"""``oomrun devices``: what there is to train on, and what stands in the way.

Covers: the table, ``--json``, and ``--watch``.
Does not cover: which of the devices a job would use (``oomrun plan``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from oomrun import devices as machine
from oomrun.core.topology import Device, Host, Inventory, NvLink, numbered, to_json
from oomrun.core.units import format_bytes

_WATCH_EVERY_S = 2.0
_CLEAR, _HOME, _TO_LINE_END, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
# As much of a UUID as tells any two apart in practice; `devices:` takes beginnings.
_SHORT_ID = 12
_NAME = 2  # the column
_SHORT_NAME = 8


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Adds ``devices`` to the commands."""
    parser = subparsers.add_parser(
        "devices", help="show the devices and their memory, and the host's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_WATCH_EVERY_S,
        metavar="SECONDS",
        help="show them again every SECONDS (default 2) until Ctrl-C",
    )
    parser.set_defaults(run=devices)


def devices(args: argparse.Namespace) -> int:
    """Prints the inventory; 0 also where there is no GPU.

    With ``--watch --json`` every line is one whole document, with the time as ``at``.
    """
    if args.watch is None:
        inventory = _inventory()
        print(
            json.dumps(to_json(inventory), indent=2) if args.json else render(inventory)
        )
        return 0
    try:
        with machine.held_open(machine.DISCOVERY_TIMEOUT_S):
            _watch(args.watch, as_json=args.json)
    except KeyboardInterrupt:
        pass
    return 0


def _watch(every_s: float, *, as_json: bool) -> None:
    """Shows the inventory again and again: in place on a terminal, else below."""
    live = sys.stdout.isatty() and not as_json
    if live:
        print(_CLEAR, end="")
    while True:
        inventory, now = _inventory(), time.time()
        if as_json:
            print(json.dumps({"at": now, **to_json(inventory)}))
        elif live:
            # Over the old lines, and not on a cleared screen, which would flicker.
            columns, rows = shutil.get_terminal_size()
            lines = _cut(render(inventory, columns), columns, rows)
            text = f"{_TO_LINE_END}\n".join(lines)
            print(f"{_HOME}{text}{_TO_LINE_END}\n{_BELOW}", end="")
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            print(f"{when}\n{render(inventory)}\n")
        sys.stdout.flush()
        time.sleep(every_s)


def _cut(text: str, columns: int, rows: int) -> list[str]:
    """The lines as far as they fit a terminal, with room for the cursor below them."""
    lines = [line[:columns] for line in text.splitlines()]
    room = max(2, rows - 1)
    if len(lines) <= room:
        return lines
    left = len(lines) - room + 1
    return [*lines[: room - 1], f"({left} more lines: the window is too low)"[:columns]]


def render(inventory: Inventory, columns: int | None = None) -> str:
    """The inventory as text for people.

    Args:
        inventory: what to show.
        columns: how wide the table may be, if it can; names are cut short for it.
    """
    rows: list[tuple[str, ...]] = [
        ("", "DEVICE", "NAME", "TOTAL", "FREE", "RESERVED", "OTHERS' USE")
    ]
    numbers = {device.id: str(n) for n, device in enumerate(numbered(inventory))}
    rows += [
        _row(device, numbers.get(device.id, ""), _short_id(device.id, inventory))
        for device in inventory.devices
    ]
    lines = _aligned(rows, columns)
    for device in inventory.devices:
        lines += _holders(device, _short_id(device.id, inventory))
    lines += ["", *_host_lines(inventory.host)]
    if inventory.driver_version is not None:
        lines.append(f"NVIDIA driver  {inventory.driver_version}")
    if inventory.nvlinks:
        lines.append(f"NVLink         {_joined(inventory.nvlinks, numbers)}")
    if inventory.problems:
        lines += ["", *(f"note: {problem}" for problem in inventory.problems)]
    return "\n".join(lines)


def _inventory() -> Inventory:
    return machine.discover(os.environ)


def _joined(links: Sequence[NvLink], numbers: Mapping[str, str]) -> str:
    """The pairs that NVLink joins, in one phrase where they are all there can be."""
    ids = {gpu: None for link in links for gpu in (link.first, link.second)}
    gpus = [numbers.get(gpu, gpu) for gpu in ids]
    if len(gpus) > 2 and len(links) == len(gpus) * (len(gpus) - 1) // 2:
        switch = any(link.through_switch for link in links)
        end = ", through a switch" if switch else ""
        return f"{', '.join(gpus)}: each with each{end}"
    return ", ".join(
        f"{numbers.get(link.first, link.first)}-{numbers.get(link.second, link.second)}"
        for link in links
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 86_400.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _row(device: Device, number: str, short_id: str) -> tuple[str, ...]:
    name = f"  {device.name}" if device.kind == "mig" else device.name
    if not device.usable:
        name += " (in MIG mode)" if device.mig_enabled else " (not usable)"
    return (
        number,
        short_id,
        name,
        _size(device.total_bytes),
        _size(device.free_bytes),
        _size(device.reserved_bytes),
        _size(device.used_by_others_bytes),
    )


def _short_id(device_id: str, inventory: Inventory) -> str:
    """The shortest beginning of an id that ``devices:`` understands."""
    for length in range(_SHORT_ID, len(device_id)):
        short = device_id[:length]
        if sum(device.id.startswith(short) for device in inventory.devices) == 1:
            return short
    return device_id


def _holders(device: Device, short_id: str) -> list[str]:
    """A line per process that holds memory of the device."""
    lines: list[str] = []
    for process in device.processes or ():
        name = f" ({process.name})" if process.name else ""
        used = process.used_bytes
        amount = "an unknown amount" if used is None else format_bytes(used)
        lines.append(f"   {short_id}: pid {process.pid}{name} holds {amount}")
    return lines


def _host_lines(host: Host) -> list[str]:
    lines = [
        f"host memory    {_size(host.memory_available_bytes)} of "
        f"{_size(host.memory_total_bytes)} available, {host.cpu_count} CPUs"
    ]
    if host.cgroup_version is not None:
        limit = (
            "no limit"
            if host.cgroup_limit_bytes is None
            else f"limit {_size(host.cgroup_limit_bytes)}, "
            f"{_size(host.cgroup_free_bytes)} free"
        )
        kills = host.oom_kill_count
        lines.append(
            f"cgroup v{host.cgroup_version}      {limit}, "
            f"{_size(host.cgroup_used_bytes)} in use"
            + (f", {kills} killed for memory so far" if kills else "")
        )
    lines.append(
        f"/dev/shm       {_size(host.shm_free_bytes)} of "
        f"{_size(host.shm_total_bytes)} free"
    )
    return lines


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _aligned(rows: Sequence[tuple[str, ...]], columns: int | None) -> list[str]:
    """The rows with their columns as wide as needed, sizes to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if columns is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - columns
        widths[_NAME] = max(_SHORT_NAME, widths[_NAME] - max(0, excess))
    return [
        "  ".join(
            _shortened(cell, width).ljust(width) if n <= _NAME else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shortened(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"
