"""Killed at any moment, called again, and nothing is to be seen of it in the end.

A seeded part of what ``benchmarks/kills.py`` does at length.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[2] / "benchmarks" / "kills.py"


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_two_killed_runs_end_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    # Seed 21: a supervisor in start-up, and a worker in training.
    found = _benchmark().kills(tmp_path, runs=2, seed=21)
    assert found["failures"] == []
    assert found["identical"] == 2
    assert found["supervisor_kills"] + found["worker_kills"] >= 1
