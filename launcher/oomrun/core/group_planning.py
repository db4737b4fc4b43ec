"""The plan of an attempt, whichever its strategy; of several workers in particular.

Covers: one worker for each device, each with its own limit and budget. Does not cover:
one device (``planning.py``), the shares, which the workers agree on once they know what
fits (``shares.py``).
"""

from __future__ import annotations

from oomrun.core import memory, planning, topology
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import Command, Cpus, JobSpec
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Inventory

__all__ = ["plan_for", "ranks"]


def ranks(plan: Plan) -> int:
    """How many workers run a plan."""
    return len(plan.devices) if plan.strategy == "horovod" else 1


def plan_for(spec: JobSpec, inventory: Inventory, state: JobState) -> Plan:
    """The plan of the next attempt; see ``planning.make_plan``.

    Raises:
        InfeasiblePlanError: no such device, or nothing fits on it.
    """
    if spec.strategy != "horovod":
        return planning.make_plan(spec, inventory, state)
    if isinstance(spec.program, Command):
        raise InfeasiblePlanError(
            "a command starts its own workers: strategy horovod is for a script or a "
            "module",
            nearest="strategy: single",
        )
    chosen = _devices(spec, inventory)
    notes: list[str] = []
    planned = tuple(
        _device(spec, inventory, chosen, rank, state, notes)
        for rank in range(len(chosen))
    )
    many = f"{len(chosen)} devices, one worker each"
    return Plan(
        strategy="horovod",
        strategy_reason=f"the job file asks for it: {many}",
        global_batch_size=spec.batch.global_size or state.global_batch_size,
        memory_mode=spec.memory.mode,
        devices=planned,
        notes=(*notes, "shares are agreed on when the workers know what fits"),
        levers=state.levers,
    )


def _devices(spec: JobSpec, inventory: Inventory) -> list[Device]:
    """The devices in the order of ranks; the CPU may be several."""
    try:
        found = topology.select(inventory, planning.wanted_devices(spec))
    except topology.SelectionError as error:
        raise InfeasiblePlanError(f"devices: {error}") from None
    if not isinstance(spec.devices, Cpus):
        return list(found)
    return [topology.cpu(found[0], index) for index in range(spec.devices.count)]


def _device(
    spec: JobSpec,
    inventory: Inventory,
    chosen: list[Device],
    rank: int,
    state: JobState,
    notes: list[str],
) -> DevicePlan:
    device = chosen[rank]
    limit = planning.limit_of(spec, inventory, device, rank, len(chosen), notes)
    budget = None
    if limit is not None:
        budget = memory.budget_bytes(limit, planning.amount(spec.memory.headroom))
        planning.check_room(device, limit, budget, state)
    return DevicePlan(
        id=device.id,
        kind=device.kind,
        rank=rank,
        limit_bytes=limit,
        budget_bytes=budget,
        micro_batch_size=_micro_batch(spec, rank, limit, state),
    )


def _micro_batch(
    spec: JobSpec, rank: int, limit: int | None, state: JobState
) -> int | None:
    """Samples a pass, at most; None where nothing has failed yet."""
    if isinstance(spec.batch.micro, int):
        return spec.batch.micro
    if rank == 0:
        known = (state.micro_batch_limit, planning.known_to_fail(state, limit))
        ceiling, failed = known
        bounds = [ceiling, None if failed is None else max(1, failed // 2)]
    else:
        failed = state.failed_by_rank.get(rank)
        bounds = [None if failed is None else max(1, failed // 2)]
    return min((bound for bound in bounds if bound is not None), default=None)
