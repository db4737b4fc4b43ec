"""The plan of an attempt, whichever its strategy; of several devices in particular.

Covers: several devices, in one worker or in one each, each with its own limit and
budget. Does not cover: which strategy (``strategy.py``), one device (``planning.py``),
the shares, which follow once it is known what fits (``shares.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomrun.core import memory, planning, strategy, topology
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import AUTO, IN_WORKERS, Command, Cpus, JobSpec
from oomrun.core.state import JobState
from oomrun.core.strategy import Situation
from oomrun.core.topology import Device, Inventory

__all__ = ["plan_for", "ranks"]


def ranks(plan: Plan) -> int:
    """How many workers run a plan."""
    return len(plan.devices) if plan.strategy in IN_WORKERS else 1


def plan_for(
    spec: JobSpec,
    inventory: Inventory,
    state: JobState,
    others: Sequence[Inventory] = (),
    *,
    horovod: bool = False,
) -> Plan:
    """The plan of the next attempt; see ``planning.make_plan``.

    Args:
        spec: what the user wrote; its ``devices`` are those of each host.
        inventory: the supervisor's host now.
        state: the run so far; a new ``JobState()`` where there is none.
        others: the hosts of a gang's other members, in their order.
        horovod: whether Horovod is installed.

    Raises:
        InfeasiblePlanError: no such device, or nothing fits on it.
    """
    hosts = (inventory, *others)
    chosen: list[list[Device]] = []
    for host in hosts:
        chosen.append(_devices(spec, host, sum(map(len, chosen))))
    choice = strategy.choose(
        spec.strategy,
        Situation(
            devices=[device for of_host in chosen for device in of_host],
            nvlinks=[link for host in hosts for link in host.nvlinks],
            hosts=len(hosts),
            horovod=horovod,
            command=isinstance(spec.program, Command),
            own_limits=spec.memory.limit != AUTO,
        ),
    )
    if choice.strategy == "single":
        return planning.make_plan(spec, inventory, state)
    notes: list[str] = []
    planned: list[DevicePlan] = []
    for number, (host, of_host) in enumerate(zip(hosts, chosen, strict=True)):
        first = len(planned)
        planned += [
            _device(spec, host, of_host, index, first + index, number, state, notes)
            for index in range(len(of_host))
        ]
    if choice.strategy == "mirrored":
        notes += _about_one_process(planned)
    return Plan(
        strategy=choice.strategy,
        strategy_reason=choice.reason,
        global_batch_size=spec.batch.global_size or state.global_batch_size,
        memory_mode=spec.memory.mode,
        devices=tuple(planned),
        notes=(
            *dict.fromkeys(notes),
            "shares are agreed on when it is known what fits",
        ),
        levers=spec.recovery.in_force(state.levers),
    )


def _about_one_process(devices: Sequence[DevicePlan]) -> Iterator[str]:
    limits = [device.limit_bytes for device in devices if device.kind == "cpu"]
    if len(limits) > 1 and None not in limits:
        yield (
            "the CPU devices of one process share one allocator: TensorFlow keeps to "
            "the sum of their limits, and each one's own is planned with only"
        )


def _devices(spec: JobSpec, inventory: Inventory, first: int) -> list[Device]:
    """A host's devices in the order of ranks; the CPU may be several.

    CPUs are counted over all hosts, from ``first`` on this one, as they have no names.
    """
    try:
        found = topology.select(inventory, planning.wanted_devices(spec))
    except topology.SelectionError as error:
        raise InfeasiblePlanError(f"devices: {error}") from None
    count = spec.devices.count if isinstance(spec.devices, Cpus) else len(found)
    if found[0].kind != "cpu":
        return list(found)
    return [topology.cpu(found[0], first + index) for index in range(count)]


def _device(
    spec: JobSpec,
    inventory: Inventory,
    chosen: list[Device],
    index: int,
    rank: int,
    host: int,
    state: JobState,
    notes: list[str],
) -> DevicePlan:
    device = chosen[index]
    limit = planning.limit_of(spec, inventory, device, index, len(chosen), notes)
    budget = None
    if limit is not None:
        budget = memory.budget_bytes(limit, planning.amount(spec.memory.headroom))
        planning.check_room(device, limit, budget, state)
    return DevicePlan(
        id=device.id,
        kind=device.kind,
        rank=rank,
        host=host,
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
