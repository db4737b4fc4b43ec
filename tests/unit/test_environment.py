"""A worker's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomrun.core.errors import SpecError
from oomrun.core.plan import DevicePlan, Plan
from oomrun.environment import check_backend, source_roots, worker_environment

MIB = 2**20


def plan(kind: str = "cpu", limit: int | None = None, name: str = "cpu:0") -> Plan:
    device = DevicePlan(id=name, kind=kind, limit_bytes=limit, budget_bytes=limit)
    return Plan(
        strategy="single",
        strategy_reason="",
        global_batch_size=None,
        memory_mode="limit",
        devices=(device,),
    )


def env(planned: Plan, **settings: Any) -> dict[str, str]:
    base = settings.pop("base", {"PATH": "/bin"})
    own = settings.pop("own", {})
    return worker_environment(
        base, own, planned, run_id="r1", seed=2**31, launch_file=Path("/l"), **settings
    )


def test_a_cpu_limit_is_rounded_down_to_mib() -> None:
    made = env(plan(limit=300 * MIB - 1))
    assert made["TF_CPU_ALLOCATOR_USE_BFC"] == "true"
    assert made["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == "299"
    assert made["CUDA_VISIBLE_DEVICES"] == "-1"


def test_a_cpu_without_limit_keeps_its_allocator() -> None:
    assert not [key for key in env(plan()) if key.startswith("TF_")]


@pytest.mark.parametrize("name", ["GPU-1", "MIG-2"])
def test_a_gpu_is_seen_by_its_uuid(name: str) -> None:
    made = env(plan("gpu", 8 * MIB, name), base={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert made["CUDA_VISIBLE_DEVICES"] == name
    assert made["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "TF_CPU_BFC_MEM_LIMIT_IN_MB" not in made


def test_defaults_are_repeatable_and_the_user_wins() -> None:
    made = env(plan())
    assert made["PYTHONHASHSEED"] == str(2**31)
    assert made["KERAS_BACKEND"] == "tensorflow"
    assert made["PYTHONUNBUFFERED"] == "1"
    assert "TF_CPP_MIN_LOG_LEVEL" not in made
    own = {"PYTHONHASHSEED": "7", "A": "job", "TF_CPP_MIN_LOG_LEVEL": "2"}
    made = env(plan(), base={"A": "outer", "PYTHONUNBUFFERED": ""}, own=own)
    assert made["PYTHONHASHSEED"] == "7"
    assert made["A"] == "job"
    assert made["PYTHONUNBUFFERED"] == ""
    assert made["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_our_roots_come_after_the_users_own() -> None:
    made = env(plan(), base={"PYTHONPATH": "/mine"}, roots=[Path("/ours")])
    assert made["PYTHONPATH"] == "/mine:/ours"
    assert env(plan(), roots=[Path("/ours")])["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in env(plan())


def test_a_worker_finds_oomrun_from_any_folder(tmp_path: Path) -> None:
    made = env(plan(), base=dict(os.environ), roots=source_roots())
    code = "import importlib.util as u; print(u.find_spec('oomrun.worker') is not None)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=made, capture_output=True
    )
    assert said.stdout == b"True\n"


@pytest.mark.parametrize("place", ["base", "own"])
def test_another_backend_is_refused(place: str) -> None:
    jax = {"KERAS_BACKEND": "jax"}
    base, own = (jax, {}) if place == "base" else ({}, jax)
    with pytest.raises(SpecError, match=r"job\.yaml:1:1: env\.KERAS_BACKEND: is 'jax'"):
        check_backend(base, own, "job.yaml")


def test_the_tensorflow_backend_is_accepted() -> None:
    check_backend({"KERAS_BACKEND": "jax"}, {"KERAS_BACKEND": "tensorflow"}, "job.yaml")
    check_backend({}, {}, "job.yaml")
