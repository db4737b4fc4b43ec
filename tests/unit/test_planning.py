"""Spec, machine and what is known -> plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomrun.core import batch
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.jobfile import load
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.planning import make_plan, reserve_bytes
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory

MIB = 2**20
GIB = 2**30
CPU = Device(
    id="cpu:0", kind="cpu", name="CPU", total_bytes=16 * GIB, free_bytes=8 * GIB
)
HOST = Host(memory_total_bytes=16 * GIB, memory_available_bytes=8 * GIB)


def gpu(name: str = "GPU-1", free: int | None = 10 * GIB) -> Device:
    return Device(
        id=name, kind="gpu", name="GPU", total_bytes=16 * GIB, free_bytes=free
    )


def machine(*gpus: Device) -> Inventory:
    return Inventory(devices=(*gpus, CPU), host=HOST)


def plan(
    settings: str = "", inventory: Inventory | None = None, **known: Any
) -> tuple[Plan, DevicePlan]:
    text = f"name: x\nscript: t.py\n{settings}\n"
    spec = load(text, filename="job.yaml", environment={})
    made = make_plan(spec, inventory or machine(), replace(JobState(), **known))
    (device,) = made.devices
    return made, device


LIMITED = "devices: {cpu: 1, memory: [100MiB]}"


def test_a_first_plan_says_what_it_does_not_know() -> None:
    made, device = plan(LIMITED)
    assert (device.limit_bytes, device.budget_bytes) == (100 * MIB, 92 * MIB)
    assert (device.share, device.micro_batch_size, device.accumulation_steps) == (
        None, None, None,
    )  # fmt: skip
    assert device.predicted_peak_bytes is None
    assert len(made.notes) == 2


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ("devices: cpu", None),
        ("memory: {limit: 1GiB}", GIB),
        ("memory: {limit: 25%}", 4 * GIB),
        (LIMITED, 100 * MIB),
    ],
)
def test_the_limit_of_a_cpu(settings: str, limit: int | None) -> None:
    _, device = plan(settings)
    assert device.limit_bytes == limit
    assert (device.budget_bytes is None) == (limit is None)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ("", 10 * GIB - reserve_bytes(16 * GIB)),
        ("memory: {reserve: 1GiB}", 9 * GIB),
        ("memory: {limit: 4GiB}", 4 * GIB),
        ("memory: {limit: 50%}", 8 * GIB),
        ("memory: {limit: 15GiB, reserve: 1GiB}", 9 * GIB),
    ],
)
def test_the_limit_of_a_gpu(settings: str, limit: int) -> None:
    _, device = plan(settings, machine(gpu()))
    assert device.limit_bytes == limit


@pytest.mark.parametrize(
    ("settings", "budget"),
    [("headroom: 10%", 90 * MIB), ("headroom: 30MiB", 70 * MIB)],
)
def test_headroom(settings: str, budget: int) -> None:
    _, device = plan(f"{LIMITED}\nmemory: {{{settings}}}")
    assert device.budget_bytes == budget


def test_the_gpu_with_most_free_memory_is_taken_with_its_reason() -> None:
    made, device = plan("", machine(gpu("GPU-1", 2 * GIB), gpu("GPU-2", 9 * GIB)))
    assert device.id == "GPU-2"
    assert "GPU-2 has most memory free" in made.strategy_reason


def test_a_cpu_job_on_a_gpu_machine() -> None:
    assert plan("devices: cpu", machine(gpu()))[1].id == "cpu:0"


@pytest.mark.parametrize(
    ("settings", "inventory", "known", "said"),
    [
        ("devices: gpu", machine(), {}, "no usable GPU"),
        ("devices: [3]", machine(gpu()), {}, "device 3 does not exist"),
        ("", machine(gpu(free=100 * MIB)), {}, "less memory free than the reserve"),
        ("memory: {limit: 1%, headroom: 1GiB}", None, {}, "headroom leaves nothing"),
        (LIMITED, None, {"state_bytes": 200 * MIB}, "own state"),
        (LIMITED, None, {"micro_batch_failed": 1}, "even one sample"),
    ],
)
def test_what_cannot_be_planned(
    settings: str, inventory: Inventory | None, known: dict[str, Any], said: str
) -> None:
    with pytest.raises(InfeasiblePlanError, match=said):
        plan(settings, inventory, **known)


@pytest.mark.parametrize(
    ("batch", "known", "micro"),
    [
        ("micro: 16", {}, 16),
        ("micro: 16", {"global_batch_size": 8}, 8),
        ("micro: {max: 16}", {}, 16),
        ("global: 64", {}, 64),
        ("global: 64, micro: {max: 16}", {}, 16),
        ("global: 64", {"micro_batch_failed": 64}, 32),
        ("global: 64", {"micro_batch_failed": 64, "micro_batch_limit": 24}, 24),
        # The policy has decided to try one sample once more, in a new process.
        ("global: 64", {"micro_batch_failed": 1, "micro_batch_limit": 1}, 1),
        ("global: 64, micro: 64", {"micro_batch_failed": 32}, 64),
        ("micro: auto", {"micro_batch_failed": 64}, 32),
        # Batches of different sizes: the first one was small.
        ("micro: auto", {"global_batch_size": 8, "micro_batch_failed": 64}, 32),
        ("micro: auto", {"global_batch_size": 64, "measured": {64: 9 * MIB}}, 64),
    ],
)
def test_the_micro_batch(batch: str, known: dict[str, Any], micro: int) -> None:
    _, device = plan(f"{LIMITED}\nbatch: {{{batch}}}", **known)
    assert device.micro_batch_size == micro


def test_what_failed_under_a_lower_limit_may_be_tried_again() -> None:
    failed = {"micro_batch_failed": 64, "micro_batch_limit": 32}
    batch = f"{LIMITED}\nbatch: {{global: 64}}"
    below = {**failed, "limit_when_failed_bytes": 50 * MIB}
    assert plan(batch, **below)[1].micro_batch_size == 64
    same = {**failed, "limit_when_failed_bytes": 98 * MIB}
    assert plan(batch, **same)[1].micro_batch_size == 32


def test_a_size_predicted_to_be_too_large_is_not_planned() -> None:
    made, device = plan(
        f"{LIMITED}\nbatch: {{global: 64}}",
        measured={8: 20 * MIB, 16: 40 * MIB},
        state_bytes=MIB,
    )
    # 2.5 MiB a sample, a quarter on top: 32 needs up to 100 of a budget of 92.
    assert device.micro_batch_size == 16
    assert device.predicted_peak_bytes == 40 * MIB
    assert any("64 is predicted to need up to" in note for note in made.notes)


def test_a_size_that_ran_is_planned_though_its_spread_is_above_the_budget() -> None:
    _, device = plan(f"{LIMITED}\nbatch: {{global: 64}}", measured={64: 91 * MIB})
    assert device.micro_batch_size == 64
    assert device.predicted_peak_high_bytes is not None
    assert device.predicted_peak_high_bytes > 92 * MIB


def test_a_limit_list_must_fit_the_devices() -> None:
    two = machine(gpu("GPU-1"), gpu("GPU-2"))
    with pytest.raises(InfeasiblePlanError, match="3 entries"):
        plan("memory: {limit: [1GiB, 2GiB, 3GiB]}", two)


@pytest.mark.parametrize(
    ("share", "size", "even"),
    [
        (4096, 570, 512), (4096, 4096, 4096), (4096, 5000, 4096), (100, 34, 25),
        (96, 96, 96), (97, 48, 33), (7, 1, 1), (1, 1, 1),
    ],
)  # fmt: skip
def test_passes_of_one_size(share: int, size: int, even: int) -> None:
    assert batch.even_micro_batch(share, size) == even
