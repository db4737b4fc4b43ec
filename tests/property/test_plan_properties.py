"""No plan exceeds what it may use, whatever is known."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from oomrun.core import memory, spec
from oomrun.core import plan as plans
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.planning import make_plan
from oomrun.core.spec import AUTO, AtMost, BatchSpec, Bytes, JobSpec, MemorySpec, Share
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory

GIB = 2**30
sizes = st.integers(1, 4096)
amounts = st.integers(1, 64 * GIB)
maybe_sizes = st.none() | sizes


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    micro = draw(st.just(AUTO) | sizes | sizes.map(AtMost))
    limit = draw(st.just(AUTO) | amounts.map(Bytes) | st.floats(0.01, 1).map(Share))
    headroom = draw(st.floats(0, 0.9).map(Share) | amounts.map(Bytes))
    return JobSpec(
        name="x",
        program=spec.Script(path="t.py"),
        batch=BatchSpec(global_size=draw(maybe_sizes), micro=micro),
        memory=MemorySpec(limit=limit, headroom=headroom),
    )


@st.composite
def machines(draw: st.DrawFn) -> Inventory:
    host = Host(memory_total_bytes=64 * GIB, memory_available_bytes=draw(amounts))
    devices = [Device(id="cpu:0", kind="cpu", name="", total_bytes=64 * GIB)]
    for number in range(draw(st.integers(0, 3))):
        free = draw(st.none() | amounts)
        devices.insert(
            0,
            Device(
                id=f"GPU-{number}", kind="gpu", name="", total_bytes=80 * GIB,
                free_bytes=free,
            ),
        )  # fmt: skip
    return Inventory(devices=tuple(devices), host=host)


@st.composite
def states(draw: st.DrawFn) -> JobState:
    return replace(
        JobState(),
        global_batch_size=draw(maybe_sizes),
        micro_batch_failed=draw(maybe_sizes),
        micro_batch_limit=draw(maybe_sizes),
        limit_when_failed_bytes=draw(st.none() | amounts),
        state_bytes=draw(st.none() | amounts),
        measured=draw(st.dictionaries(sizes, amounts, max_size=4)),
    )


@given(specs(), machines(), states())
def test_a_plan_keeps_within_all_bounds(
    job: JobSpec, machine: Inventory, state: JobState
) -> None:
    try:
        made = make_plan(job, machine, state)
    except InfeasiblePlanError:
        return
    (device,) = made.devices
    free = next(d.free_bytes for d in machine.devices if d.id == device.id)
    if device.kind == "gpu" and free is not None and device.limit_bytes is not None:
        assert device.limit_bytes < free
    if device.limit_bytes is not None:
        assert device.budget_bytes is not None
        assert 0 < device.budget_bytes <= device.limit_bytes
    assert device.share == made.global_batch_size
    micro = device.micro_batch_size
    if micro is None:
        return
    assert micro >= 1
    if device.share is not None:
        assert micro <= device.share
    if isinstance(job.batch.micro, AtMost):
        assert micro <= job.batch.micro.size
    if isinstance(job.batch.micro, int):
        return
    grew = memory.limit_grew(state.limit_when_failed_bytes, device.limit_bytes)
    if state.micro_batch_failed is not None and not grew:
        # One sample may be tried once more, in a new process: policy.py says when.
        last = state.micro_batch_failed == state.micro_batch_limit == 1
        assert micro < state.micro_batch_failed or (last and micro == 1)
    if device.budget_bytes is not None and device.predicted_peak_high_bytes is not None:
        assert (
            device.predicted_peak_high_bytes <= device.budget_bytes
            or micro in state.measured
            or micro == 1
        )


@given(specs(), machines(), states())
def test_a_plan_survives_the_trip_to_the_worker(
    job: JobSpec, machine: Inventory, state: JobState
) -> None:
    try:
        made = make_plan(job, machine, state)
    except InfeasiblePlanError:
        assume(False)
        return
    assert plans.from_json(plans.to_json(made)) == made
