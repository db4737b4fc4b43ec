"""The plan of an attempt, whichever its strategy; of several devices in particular.

Covers: several devices, in one worker or in one each, each with its own limit and
budget. Does not cover: which strategy (``strategy.py``), one device (``planning.py``),
the shares, which follow once it is known what fits (``shares.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from oomrun.core import levers, memory, planning, state_memory, strategy, topology
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import AUTO, IN_WORKERS, Command, Cpus, JobSpec
from oomrun.core.state import JobState
from oomrun.core.strategy import Situation
from oomrun.core.topology import Device, Inventory

__all__ = ["plan_for", "ranks"]


_OPEN = (
    "each worker has a server of TensorFlow's, which listens on all of its host's "
    "interfaces and takes orders from whoever reaches it: the network must be private"
)


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
    places = [
        _Place(spec, host, of_host, index, number)
        for number, (host, of_host) in enumerate(zip(hosts, chosen, strict=True))
        for index in range(len(of_host))
    ]
    found, left_out = _holding(places, state, choice.strategy, notes)
    state = state_memory.on_devices(state, [place.device.id for place, _ in found])
    planned = [
        _device(place, limit, rank, state) for rank, (place, limit) in enumerate(found)
    ]
    if choice.strategy == "mirrored":
        notes += _about_one_process(planned)
    if choice.strategy == "multi_worker_mirrored":
        notes.append(_OPEN)
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
        left_out=left_out,
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A device that the job may use, and where it is."""

    spec: JobSpec
    inventory: Inventory
    of_host: list[Device]
    index: int
    host: int

    @property
    def device(self) -> Device:
        return self.of_host[self.index]

    def limit(self, notes: list[str]) -> int | None:
        count = len(self.of_host)
        return planning.limit_of(
            self.spec, self.inventory, self.device, self.index, count, notes
        )

    def budget(self, limit: int) -> int:
        return memory.budget_bytes(limit, planning.amount(self.spec.memory.headroom))


_Found = list[tuple[_Place, int | None]]


def _holding(
    places: Sequence[_Place], state: JobState, strategy: str, notes: list[str]
) -> tuple[_Found, tuple[str, ...]]:
    """The devices to train on, with their limits, and those that are left out.

    Raises:
        InfeasiblePlanError: one does not hold the model, and none may be left out, or
            all would be.
    """
    found: _Found = []
    left_out: list[str] = []
    for place in places:
        may = levers.FEWER_DEVICES in place.spec.recovery.levers
        # With one worker for all, what the optimizer keeps is on the first alone.
        whole = strategy != "mirrored" or not found
        try:
            limit = _checked_limit(place, state, notes, whole=whole)
        except InfeasiblePlanError as error:
            if not may or (place is places[-1] and not found):
                raise
            why = str(error)
        else:
            if not may or not _is_out(place.device.id, limit, state):
                found.append((place, limit))
                continue
            why = "not even one sample fitted on it"
        left_out.append(place.device.id)
        notes.append(f"{place.device.id} is left out (lever fewer_devices): {why}")
    if not found:
        raise InfeasiblePlanError(
            f"none of the devices is left: {', '.join(left_out)} could not hold even "
            "one sample"
        )
    return found, tuple(left_out)


def _is_out(device: str, limit: int | None, state: JobState) -> bool:
    out = device in state.left_out
    return out and not memory.limit_grew(state.left_out[device], limit)


def _checked_limit(
    place: _Place, state: JobState, notes: list[str], *, whole: bool
) -> int | None:
    limit = place.limit(notes)
    if limit is not None:
        held = state if whole else replace(state, state_bytes=None)
        planning.check_room(place.device, limit, place.budget(limit), held)
    return limit


def _device(place: _Place, limit: int | None, rank: int, state: JobState) -> DevicePlan:
    device = place.device
    return DevicePlan(
        id=device.id,
        kind=device.kind,
        rank=rank,
        host=place.host,
        limit_bytes=limit,
        budget_bytes=None if limit is None else place.budget(limit),
        micro_batch_size=_micro_batch(place.spec, rank, limit, state),
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
