"""The plan of an attempt, whichever its strategy; of several workers in particular.

Covers: one worker for each device, each with its own limit and budget, on one host or
several. Does not cover:
one device (``planning.py``), the shares, which the workers agree on once they know what
fits (``shares.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


def plan_for(
    spec: JobSpec,
    inventory: Inventory,
    state: JobState,
    hosts: Mapping[str, Inventory] | None = None,
) -> Plan:
    """The plan of the next attempt; see ``planning.make_plan``.

    Args:
        spec: what the user wrote.
        inventory: the machine now.
        state: the run so far.
        hosts: what each host of the job has, in the order of ranks; "" is this one.
            None: this one alone.

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
    notes: list[str] = []
    planned: list[DevicePlan] = []
    machines = {"": inventory} if hosts is None else hosts
    for host, machine in machines.items():
        planned += _on_host(spec, host, machine, len(planned), state, notes)
    many = f"{len(planned)} devices, one worker each"
    if len(machines) > 1:
        many += f", on {len(machines)} hosts"
    return Plan(
        strategy="horovod",
        strategy_reason=f"the job file asks for it: {many}",
        global_batch_size=spec.batch.global_size or state.global_batch_size,
        memory_mode=spec.memory.mode,
        devices=tuple(planned),
        notes=(*notes, "shares are agreed on when the workers know what fits"),
    )


def _on_host(
    spec: JobSpec,
    host: str,
    inventory: Inventory,
    before: int,
    state: JobState,
    notes: list[str],
) -> list[DevicePlan]:
    """The devices of one host, ``before`` having been planned on others."""
    try:
        chosen = _devices(spec, inventory, before)
    except topology.SelectionError as error:
        on = f" on {host}" if host else ""
        raise InfeasiblePlanError(f"devices{on}: {error}") from None
    return [
        replace(
            _device(spec, inventory, chosen, place, before + place, state, notes),
            host=host,
        )
        for place in range(len(chosen))
    ]


def _devices(spec: JobSpec, inventory: Inventory, before: int) -> list[Device]:
    """The devices in the order of ranks; the CPU may be several."""
    found = topology.select(inventory, planning.wanted_devices(spec))
    if not isinstance(spec.devices, Cpus):
        # That of another host must not have the same name.
        cpus = enumerate(found, before)
        return [topology.cpu(d, n) if d.kind == "cpu" else d for n, d in cpus]
    numbers = range(before, before + spec.devices.count)
    return [topology.cpu(found[0], number) for number in numbers]


def _device(
    spec: JobSpec,
    inventory: Inventory,
    chosen: list[Device],
    place: int,
    rank: int,
    state: JobState,
    notes: list[str],
) -> DevicePlan:
    device = chosen[place]
    limit = planning.limit_of(spec, inventory, device, place, len(chosen), notes)
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
