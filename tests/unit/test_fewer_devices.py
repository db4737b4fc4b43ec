"""The lever ``fewer_devices``: going on without what does not hold one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from oomrun.core import events as ev
from oomrun.core import plan as plans
from oomrun.core import spec as specs
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.group_planning import plan_for
from oomrun.core.plan import Plan
from oomrun.core.policy import Fail, Limits, Restart, decide
from oomrun.core.spec import Bytes, Cpus, Gpus, JobSpec, MemorySpec, RecoverySpec
from oomrun.core.state import JobState
from oomrun.core.status import status_json
from oomrun.core.topology import Device, Host, Inventory
from oomrun.core.words import describe

GIB, MIB = 2**30, 2**20
HOST = Host(memory_total_bytes=64 * GIB, memory_available_bytes=32 * GIB)
MACHINE = Inventory(devices=(Device(id="cpu:0", kind="cpu", name=""),), host=HOST)
LEVERS = ("micro_batch", "fewer_devices")
SPEC = JobSpec(
    name="x",
    program=specs.Script(path="t.py"),
    strategy="horovod",
    devices=Cpus(count=3),
    memory=MemorySpec(limit=tuple(Bytes(n * MIB) for n in (600, 30, 200))),
    recovery=RecoverySpec(levers=LEVERS),
)


def gpus(*free_gib: float) -> Inventory:
    found = [
        Device(
            id=f"GPU-{n}", kind="gpu", name="", total_bytes=8 * GIB,
            free_bytes=int(free * GIB),
        )
        for n, free in enumerate(free_gib)
    ]  # fmt: skip
    return Inventory(devices=tuple(found), host=HOST)


ON_GPUS = replace(SPEC, devices=Gpus(), memory=MemorySpec())


def begun(state: JobState, plan: Plan, attempt: int) -> JobState:
    started = ev.AttemptStarted(at=1.0, attempt=attempt, plan=plans.to_json(plan))
    return state.after(started)


def out_of_memory(state: JobState, rank: int, size: int | None) -> JobState:
    """The attempt's end after ``rank`` ran out: in training, or before, if no size."""
    plan = state.plan or {}
    if size is None:
        state = state.after(
            ev.ScriptEnded(
                at=2.0, attempt=state.attempt, rank=rank, outcome="raised",
                exit_code=1, exception="ResourceExhaustedError", oom=True,
            )
        )  # fmt: skip
    else:
        state = state.after(
            ev.OomOccurred(
                at=2.0, attempt=state.attempt, rank=rank,
                device=plan["devices"][rank]["id"], kind="device", phase="gradients",
                recovery="restart", micro_batch_size=size, step=0, message="",
            )
        )  # fmt: skip
    return state.after(
        ev.AttemptEnded(
            at=3.0, attempt=state.attempt, cause="device_oom", summary="out",
            exit_code=1, rank=rank,
        )
    )  # fmt: skip


def decided(
    state: JobState, *order: str, cause: Cause = Cause.DEVICE_OOM
) -> Restart | Fail:
    allowed = {"oom": 10, "crash": 3, "preemption": None, "hang": 3}
    limits = Limits(max_restarts=allowed, levers=order or LEVERS)
    found = decide(Diagnosis(cause=cause, summary="out"), state, limits)
    assert isinstance(found, Restart | Fail)
    return found


def after(state: JobState, decision: Restart | Fail) -> JobState:
    assert isinstance(decision, Restart)
    made = ev.DecisionMade(
        at=4.0, attempt=state.attempt, action="restart", cause="oom",
        reason=decision.reason, micro_batch_size=decision.micro_batch_size,
        levers=decision.levers, left_out=decision.left_out,
    )  # fmt: skip
    return state.after(made)


def ids(plan: Plan) -> list[tuple[str, int]]:
    return [(device.id, device.rank) for device in plan.devices]


@pytest.mark.parametrize("size", [None, 1])
def test_the_others_go_on_without_it(size: int | None) -> None:
    state = begun(JobState(), plan_for(SPEC, MACHINE, JobState()), 1)
    decision = decided(out_of_memory(state, 1, size))
    assert "without cpu:1 from now on, by the lever fewer_devices (" in decision.reason
    state = after(out_of_memory(state, 1, size), decision)
    plan = plan_for(SPEC, MACHINE, state)
    assert ids(plan) == [("cpu:0", 0), ("cpu:2", 1)]
    assert [device.limit_bytes for device in plan.devices] == [600 * MIB, 200 * MIB]
    assert plan.left_out == ("cpu:1",)
    assert plans.from_json(plans.to_json(plan)) == plan
    state = begun(state, plan, 2)
    assert status_json(state)["left_out"] == ["cpu:1"]
    started = ev.AttemptStarted(at=1.0, attempt=2, plan=plans.to_json(plan))
    assert (describe(started, state) or "").endswith("(limit 200MiB), without cpu:1")


def test_the_micro_batch_comes_first_wherever_it_is_listed() -> None:
    state = begun(JobState(), plan_for(SPEC, MACHINE, JobState()), 1)
    state = replace(state, global_batch_size=96)
    for order in (LEVERS, LEVERS[::-1]):
        found = decided(out_of_memory(state, 1, 8), *order)
        assert isinstance(found, Restart)
        assert found.left_out is None
        assert "micro-batch 8 -> 4" in found.reason
    assert isinstance(decided(out_of_memory(state, 1, 1), "micro_batch"), Fail)


def test_it_is_pulled_for_each_device_but_the_last() -> None:
    state, gone = JobState(), []
    for attempt in (1, 2, 3):
        plan = plan_for(SPEC, MACHINE, state)
        state = out_of_memory(begun(state, plan, attempt), 0, 1)
        decision = decided(state)
        if isinstance(decision, Fail):
            break
        state = after(state, decision)
        gone.append(tuple(state.left_out))
    assert gone == [("cpu:0",), ("cpu:0", "cpu:1")]
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3


def test_what_failed_goes_with_its_device() -> None:
    state = begun(JobState(), plan_for(SPEC, MACHINE, JobState()), 1)
    state = replace(
        state, failed_by_rank={2: 24}, micro_batch_failed=64, micro_batch_limit=32
    )
    state = after(out_of_memory(state, 1, 1), decided(out_of_memory(state, 1, 1)))
    plan = plan_for(SPEC, MACHINE, state)
    assert [device.micro_batch_size for device in plan.devices] == [32, 12]
    state = begun(state, plan, 2)
    assert (state.failed_by_rank, state.micro_batch_failed) == ({1: 24}, 64)
    # And without the first one the second is the first.
    state = after(out_of_memory(state, 0, 1), decided(out_of_memory(state, 0, 1)))
    plan = plan_for(SPEC, MACHINE, state)
    assert [device.micro_batch_size for device in plan.devices] == [12]
    state = begun(state, plan, 3)
    assert (state.failed_by_rank, state.micro_batch_failed) == ({}, 24)
    assert state.limit_when_failed_bytes == 200 * MIB


def test_it_comes_back_with_more_memory() -> None:
    state = begun(JobState(), plan_for(ON_GPUS, gpus(7, 1.5), JobState()), 1)
    state = out_of_memory(state, 1, 1)
    state = after(state, decided(state))
    assert ids(plan_for(ON_GPUS, gpus(7, 1.55), state)) == [("GPU-0", 0)]
    plan = plan_for(ON_GPUS, gpus(7, 7), state)
    assert ids(plan) == [("GPU-0", 0), ("GPU-1", 1)]
    assert plan.left_out == ()


@pytest.mark.parametrize("strategy", ["horovod", "mirrored"])
def test_a_device_without_room_is_left_out_before_it_fails(strategy: str) -> None:
    spec = replace(ON_GPUS, strategy=strategy)
    plan = plan_for(spec, gpus(7, 0.2), JobState())
    assert (ids(plan), plan.left_out) == ([("GPU-0", 0)], ("GPU-1",))
    assert any("GPU-1 is left out (lever fewer_devices)" in n for n in plan.notes)
    without = replace(spec, recovery=RecoverySpec(levers=("micro_batch",)))
    with pytest.raises(InfeasiblePlanError, match="GPU-1 has less memory free"):
        plan_for(without, gpus(7, 0.2), JobState())
    with pytest.raises(InfeasiblePlanError, match="GPU-1 has less memory free"):
        plan_for(spec, gpus(0.2, 0.2), JobState())


@pytest.mark.parametrize(
    ("strategy", "found"), [("horovod", ["cpu:0", "cpu:2"]), ("mirrored", None)]
)
def test_the_models_state_must_fit_where_an_optimizer_is(
    strategy: str, found: Sequence[str] | None
) -> None:
    state = replace(JobState(), state_bytes=100 * MIB)
    plan = plan_for(replace(SPEC, strategy=strategy), MACHINE, state)
    named = [device.id for device in plan.devices]
    assert named == (found or ["cpu:0", "cpu:1", "cpu:2"])


def test_all_of_them_are_too_small() -> None:
    state = replace(JobState(), left_out={f"cpu:{n}": None for n in range(3)})
    with pytest.raises(InfeasiblePlanError, match="none of the devices is left"):
        plan_for(SPEC, MACHINE, state)


def test_in_one_process_the_message_names_the_device() -> None:
    spec = replace(SPEC, strategy="mirrored")
    state = begun(JobState(), plan_for(spec, MACHINE, JobState()), 1)
    ended: dict[str, Any] = {"cause": "device_oom", "summary": "out", "exit_code": 1}
    for text, wanted in (
        ("OOM on /job:localhost/replica:0/task:0/device:GPU:2 by", "cpu:2"),
        ("OOM", "cpu:0"),
    ):
        raised = ev.ScriptEnded(
            at=2.0, attempt=1, rank=0, outcome="raised", exit_code=1, message=text
        )
        failed = state.after(raised).after(
            ev.AttemptEnded(at=3.0, attempt=1, rank=0, **ended)
        )
        decision = decided(failed)
        assert isinstance(decision, Restart)
        assert decision.left_out == (wanted,)


def test_where_host_memory_ran_out_a_rank_less_is_on_that_host() -> None:
    state = begun(JobState(), plan_for(SPEC, MACHINE, JobState()), 1)
    state = replace(state, failed_rank=1)
    found = decided(state, cause=Cause.HOST_OOM)
    assert isinstance(found, Restart)
    assert found.left_out == ("cpu:2",)
    # One process has all devices: without one of them it needs hardly less.
    spec = replace(SPEC, strategy="mirrored")
    state = begun(JobState(), plan_for(spec, MACHINE, JobState()), 1)
    assert isinstance(decided(state, cause=Cause.HOST_OOM), Fail)
