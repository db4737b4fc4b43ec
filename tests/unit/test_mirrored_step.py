"""A step that several devices take is that of one; empty and unequal shares, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "mirrored_cases.py"


@pytest.fixture(scope="module")
def apart() -> dict[str, Any]:
    env = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, str(CASES)], env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", ["dense", "eager", "masked", "two_optimizers"])
def test_as_far_as_one_device(apart: dict[str, Any], case: str) -> None:
    assert apart[case]["variables"] < 1e-12
    assert apart[case]["logs"] < 1e-12
