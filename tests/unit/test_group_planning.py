"""The plan of several workers, one for each device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomrun.core import spec as specs
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.group_planning import plan_for, ranks
from oomrun.core.spec import BatchSpec, Bytes, Cpus, Gpus, JobSpec, MemorySpec
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory

GIB, MIB = 2**30, 2**20
HOST = Host(memory_total_bytes=64 * GIB, memory_available_bytes=32 * GIB)
CPU = Device(id="cpu:0", kind="cpu", name="")
MACHINE = Inventory(
    devices=(
        Device(
            id="GPU-a", kind="gpu", name="", total_bytes=8 * GIB, free_bytes=7 * GIB
        ),
        Device(
            id="GPU-b", kind="gpu", name="", total_bytes=8 * GIB, free_bytes=3 * GIB
        ),
        CPU,
    ),
    host=HOST,
)
SPEC = JobSpec(
    name="x",
    program=specs.Script(path="t.py"),
    strategy="horovod",
    devices=Cpus(count=2),
    memory=MemorySpec(limit=(Bytes(600 * MIB), Bytes(200 * MIB))),
)


def test_one_worker_for_each_cpu_device() -> None:
    plan = plan_for(SPEC, MACHINE, JobState())
    assert plan.strategy == "horovod"
    assert ranks(plan) == 2
    found = [(d.id, d.rank, d.limit_bytes, d.budget_bytes) for d in plan.devices]
    assert found == [
        ("cpu:0", 0, 600 * MIB, 552 * MIB),
        ("cpu:1", 1, 200 * MIB, 184 * MIB),
    ]


def test_one_worker_for_each_gpu_with_what_is_free_on_it() -> None:
    spec = replace(SPEC, devices=Gpus(), memory=MemorySpec())
    plan = plan_for(spec, MACHINE, JobState())
    assert [(d.id, d.rank) for d in plan.devices] == [("GPU-a", 0), ("GPU-b", 1)]
    first, second = (device.limit_bytes or 0 for device in plan.devices)
    assert first - second == 4 * GIB


def test_what_failed_in_a_worker_is_not_tried_there_again() -> None:
    state = replace(JobState(), failed_by_rank={1: 24})
    plan = plan_for(SPEC, MACHINE, state)
    assert [device.micro_batch_size for device in plan.devices] == [None, 12]
    state = replace(JobState(), micro_batch_limit=16)
    plan = plan_for(SPEC, MACHINE, state)
    assert [device.micro_batch_size for device in plan.devices] == [16, None]


def test_a_fixed_micro_batch_is_that_of_each() -> None:
    spec = replace(SPEC, batch=BatchSpec(micro=8))
    plan = plan_for(spec, MACHINE, JobState())
    assert [device.micro_batch_size for device in plan.devices] == [8, 8]


def test_a_command_is_refused() -> None:
    spec = replace(SPEC, program=specs.Command(argv=("a",)))
    with pytest.raises(InfeasiblePlanError, match="starts its own workers"):
        plan_for(spec, MACHINE, JobState())


def test_mirrored_is_one_worker_for_all_devices() -> None:
    plan = plan_for(replace(SPEC, strategy="mirrored"), MACHINE, JobState())
    assert (plan.strategy, ranks(plan)) == ("mirrored", 1)
    found = [(d.id, d.rank, d.limit_bytes, d.budget_bytes) for d in plan.devices]
    assert found == [
        ("cpu:0", 0, 600 * MIB, 552 * MIB),
        ("cpu:1", 1, 200 * MIB, 184 * MIB),
    ]
    assert any("share one allocator" in note for note in plan.notes)


def test_auto_takes_all_gpus() -> None:
    spec = replace(SPEC, strategy="auto", devices=Gpus(), memory=MemorySpec())
    plan = plan_for(spec, MACHINE, JobState(), horovod=True)
    assert plan.strategy == "mirrored"
    assert [device.id for device in plan.devices] == ["GPU-a", "GPU-b"]
    assert plan.strategy_reason.startswith("auto: 2 devices of one host")


def test_auto_with_one_device_is_planned_as_single() -> None:
    spec = replace(SPEC, strategy="auto", devices=Cpus(), memory=MemorySpec())
    assert plan_for(spec, MACHINE, JobState(), horovod=True) == plan_for(
        spec, MACHINE, JobState()
    )
    assert plan_for(spec, MACHINE, JobState()).strategy == "single"


def test_other_strategies_are_planned_as_before() -> None:
    spec = replace(SPEC, strategy="single", devices=Cpus(), memory=MemorySpec())
    plan = plan_for(spec, MACHINE, JobState())
    assert (plan.strategy, ranks(plan), len(plan.devices)) == ("single", 1, 1)
