"""Asking ``oomrun.devices`` on the machine that ``nvml_library`` describes.

Each question is answered by a process of its own, since the loader reads where the
library is when a process starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from nvml_library import GIB, RESERVED_BYTES, Machine

FREE_BYTES = 80 * GIB - RESERVED_BYTES
CLI = """
import argparse, sys
from oomrun.cli import devices_command
parser = argparse.ArgumentParser()
devices_command.add_parser(parser.add_subparsers())
args = parser.parse_args()
sys.exit(args.run(args))
"""


def python(
    machine: Machine, code: str, *args: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs code on the machine, where a warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        env=machine.environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
    )


def answer(machine: Machine, expression: str, **more: str) -> Any:
    """What an expression over ``oomrun.devices`` is worth."""
    code = (
        "import dataclasses, json, os, time\n"
        "from oomrun import devices\n"
        "from oomrun.core.topology import to_json\n"
        f"value = {expression}\n"
        "if dataclasses.is_dataclass(value): value = dataclasses.asdict(value)\n"
        "print(json.dumps(value))"
    )
    done = python(machine, code, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def inventory(machine: Machine, more: str = "", **environment: str) -> Any:
    """The machine's inventory as JSON values."""
    return answer(
        machine, f"to_json(devices.discover(os.environ, {more}))", **environment
    )


def by_id(found: Any) -> dict[str, Any]:
    """The devices of an inventory by their ids."""
    return {device["id"]: device for device in found["devices"]}
