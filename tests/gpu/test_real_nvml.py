"""The inventory on a real NVIDIA driver; ``check.py`` beside it does the comparing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomrun import devices
from oomrun.core.topology import Memory

pytestmark = pytest.mark.gpu

CHECK = Path(__file__).parent / "check.py"


@pytest.fixture(scope="module")
def gpu_id() -> str:
    """A usable GPU; without one the tests are skipped, with the reason."""
    inventory = devices.discover({})
    for device in inventory.devices:
        if device.kind == "gpu" and device.usable:
            return device.id
    pytest.skip(f"no usable NVIDIA GPU: {'; '.join(inventory.problems) or 'none'}")


def test_memory_adds_up(gpu_id: str) -> None:
    memory = devices.memory_of(gpu_id)
    assert isinstance(memory, Memory)
    assert memory.reserved_bytes is not None, "drivers since 510 tell"
    parts = memory.free_bytes + memory.used_bytes + memory.reserved_bytes
    assert abs(memory.total_bytes - parts) <= 1 << 20


def test_the_environment_hides_it(gpu_id: str) -> None:
    inventory = devices.discover({"CUDA_VISIBLE_DEVICES": "-1"})
    assert [device.id for device in inventory.devices] == ["cpu:0"]


def test_all_checks_hold(gpu_id: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, json.loads(done.stdout)["failed"]
