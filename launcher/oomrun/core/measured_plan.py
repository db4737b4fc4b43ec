"""The plan that follows from what was measured, here or for a device that is not here.

Covers: ``measured_plan`` (sizes were tried on the job's own device), ``plan_elsewhere``
(nothing but the graph of the step is known). Does not cover: what is planned without
any (``planning.py``), measuring (``oomrun.measuring``).
"""

from __future__ import annotations

from dataclasses import replace

from oomrun.core import breakdown, planning
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.events import MicroBatchPlanned, StateMeasured
from oomrun.core.memory import MemoryModel, Peak, largest, peak_of
from oomrun.core.plan import Plan
from oomrun.core.spec import AUTO, AtMost, Cpus, JobSpec
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory
from oomrun.core.units import format_bytes

__all__ = ["measured_plan", "plan_elsewhere"]

#: The name of a device that is not here.
ELSEWHERE = "gpu:elsewhere"


def measured_plan(
    spec: JobSpec, inventory: Inventory, state: JobState, planned: MicroBatchPlanned
) -> Plan:
    """The plan of a run that begins with what the worker has chosen.

    Args:
        spec: what the user wrote.
        inventory: the machine.
        state: of the run that has measured.
        planned: what it has come to.
    """
    peak = peak_of(planned.predicted_peak_bytes, planned.predicted_peak_high_bytes)
    size = planned.micro_batch_size
    return _with(spec, inventory, state, size, peak, planned.reason)


def plan_elsewhere(
    spec: JobSpec, host: Host, free_bytes: int, seen: StateMeasured
) -> Plan:
    """The plan for one GPU that has so much memory free, from the graph of the step.

    Args:
        spec: what the user wrote; which devices it asks for does not count.
        host: whatever host; it is not planned into.
        free_bytes: of the GPU.
        seen: what the worker has found out of the model, wherever.

    Raises:
        InfeasiblePlanError: not even one sample is likely to fit.
    """
    gpu = Device(
        id=ELSEWHERE,
        kind="gpu",
        name="a GPU that is not here",
        total_bytes=free_bytes,
        free_bytes=free_bytes,
    )
    inventory = Inventory(devices=(gpu,), host=host)
    memory = spec.memory
    if isinstance(spec.devices, Cpus):
        memory = replace(memory, limit=AUTO)  # it is the CPU's
    spec = replace(
        spec,
        devices=AUTO,
        memory=memory,
        batch=replace(spec.batch, global_size=seen.global_batch_size),
    )
    made = planning.make_plan(spec, inventory, JobState())
    known, budget = breakdown.known_from_graph(seen), made.devices[0].budget_bytes
    if budget is None or not known.static:
        return replace(made, notes=(*made.notes, _UNTOLD))
    least, most = _bounds(spec, seen.global_batch_size)
    sure = known.largest_within(budget, most)
    likely = largest(lambda size: _likely(known, size) <= budget, most)
    if likely < least:
        raise InfeasiblePlanError(
            f"by the graph of its step, micro-batch {least} needs more than such a GPU "
            "has for it",
            needed_bytes=_likely(known, least),
            available_bytes=budget,
        )
    size = max(least, sure)
    note = _range(sure, likely, most)
    made = _with(spec, inventory, JobState(), size, known.predict(size), note)
    kept = free_bytes - (made.devices[0].limit_bytes or free_bytes)
    reserve = (
        f"{format_bytes(kept)} of {format_bytes(free_bytes)} are left to the CUDA "
        "context and libraries, or by memory.limit"
    )
    return replace(made, notes=(reserve, *made.notes))


_UNTOLD = (
    "the graph of this model's step tells nothing of its memory: it is run eagerly or "
    "by XLA, or its batches are no plain tensors"
)


def _bounds(spec: JobSpec, samples: int) -> tuple[int, int]:
    """The smallest and the largest micro-batch that the job file allows."""
    match spec.batch.micro:
        case int(size):
            return min(size, samples), min(size, samples)
        case AtMost(size):
            return 1, min(size, samples)
        case _:
            return 1, samples


def _likely(known: MemoryModel, size: int) -> int:
    peak = known.predict(size)
    return 0 if peak is None else peak.bytes


def _range(sure: int, likely: int, most: int) -> str:
    told = (
        "predicted from the graph of the step alone, of which real steps took up to "
        "2.1 times as much, and which XLA, where Keras uses it on a GPU, changes: "
    )
    if sure >= most:
        return f"{told}micro-batch {most}, as large as it may be, should fit"
    begins = (
        f"a run would try sizes from about {sure} on"
        if sure
        else ("it is not sure that one sample at a time fits")
    )
    return f"{told}{begins}; up to {likely} may fit"


def _with(
    spec: JobSpec,
    inventory: Inventory,
    state: JobState,
    size: int,
    peak: Peak | None,
    note: str,
) -> Plan:
    """The plan with a micro-batch and a peak that are known already."""
    # With the size as a given one, so that none is chosen, and a peak, so that no note
    # says that there is none.
    given = replace(spec, batch=replace(spec.batch, micro=size))
    if peak is not None:
        measured = {**state.measured, size: peak.bytes}
        state = replace(state, measured=measured, recorded={})
    made = planning.make_plan(given, inventory, state)
    (device,) = made.devices
    device = replace(
        device,
        micro_batch_size=size,
        predicted_peak_bytes=None if peak is None else peak.bytes,
        predicted_peak_high_bytes=None if peak is None else peak.high_bytes,
    )
    return replace(made, devices=(device,), notes=(*made.notes, note))
