"""From what is wanted, what there is and what is known to the plan of one attempt.

Covers: ``make_plan``: device, limit, budget, micro-batch, predicted peak, each with its
reason. Does not cover: what follows a failure (``policy.py``), or reading the machine.

Of one device (strategy ``single``); of several, see ``group_planning.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oomrun.core import batch, command, command_notes, levers, memory, topology
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.recorded import Recorded
from oomrun.core.spec import (
    AtMost,
    Auto,
    Bytes,
    Command,
    Cpus,
    Gpus,
    JobSpec,
    Share,
)
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Inventory
from oomrun.core.units import format_bytes

__all__ = [
    "amount", "check_room", "known_to_fail", "limit_of", "make_plan", "reserve_bytes",
    "wanted_devices",
]  # fmt: skip

_MIB = 1024 * 1024


def make_plan(spec: JobSpec, inventory: Inventory, state: JobState) -> Plan:
    """The plan of the next attempt.

    What this run has measured so far decides the micro-batch. A size that ran out of
    memory is not planned again, and no size whose predicted peak is above the budget,
    unless it is one that did run or the last resort of one sample at a time.

    Args:
        spec: what the user wrote.
        inventory: the machine now.
        state: the run so far; a new ``JobState()`` where there is none.

    Raises:
        InfeasiblePlanError: no such device, or nothing fits on it.
    """
    device, index, count, reason = _choose(spec, inventory)
    notes: list[str] = []
    limit = limit_of(spec, inventory, device, index, count, notes)
    budget = None
    if limit is not None:
        kept = amount(spec.memory.headroom)
        budget = memory.budget_bytes(limit, kept)
        # An optimizer that keeps less is decided on once memory has really run out.
        may = levers.for_state(spec.recovery.left, state)
        held = replace(state, state_bytes=None) if may else state
        check_room(device, limit, budget, held)
    share = _share(spec, state)
    grew = memory.limit_grew(state.limit_when_failed_bytes, limit)
    known = _Known(
        share=share,
        failed=known_to_fail(state, limit),
        ceiling=None if grew else state.micro_batch_limit,
        measured=state.measured,
        recorded=state.recorded,
        state_bytes=state.state_bytes,
        budget=budget,
    )
    micro = _micro_batch_size(spec, known, device, notes)
    peak = known.predict(micro)
    if isinstance(spec.program, Command):
        notes += command_notes.about(spec, spec.program, device)
    elif share is None:
        notes.append(
            "global_batch_size, share and accumulation_steps are not known until the "
            "script has called fit once"
        )
    if peak is None and not isinstance(spec.program, Command):
        notes.append(
            "no peak is predicted until a step of this run was measured"
            + ("" if limit is not None else ", and none is without a memory limit")
        )
    planned = DevicePlan(
        id=device.id,
        kind=device.kind,
        limit_bytes=limit,
        budget_bytes=budget,
        share=share,
        micro_batch_size=micro,
        predicted_peak_bytes=None if peak is None else peak.bytes,
        predicted_peak_high_bytes=None if peak is None else peak.high_bytes,
    )
    return Plan(
        strategy="single",
        strategy_reason=reason,
        global_batch_size=share,
        memory_mode=spec.memory.mode,
        devices=(planned,),
        notes=tuple(notes),
        levers=spec.recovery.in_force(state.levers),
    )


def _share(spec: JobSpec, state: JobState) -> int | None:
    """Samples of a global batch; of the largest known, where they differ."""
    known = spec.batch.global_size or state.global_batch_size
    if spec.batch.global_size or known is None:
        return known
    return max(known, state.micro_batch_failed or 0)


def known_to_fail(state: JobState, limit_bytes: int | None) -> int | None:
    """The smallest micro-batch that ran out of memory, if that still says something."""
    if memory.limit_grew(state.limit_when_failed_bytes, limit_bytes):
        return None
    return state.micro_batch_failed


# --- the device ---------------------------------------------------------------------


def _choose(spec: JobSpec, inventory: Inventory) -> tuple[Device, int, int, str]:
    """The device, its index among those wanted, how many they are, and why this one."""
    try:
        wanted = topology.select(inventory, wanted_devices(spec))
    except topology.SelectionError as error:
        raise InfeasiblePlanError(f"devices: {error}") from None
    best = max(wanted, key=lambda device: device.free_bytes or 0)
    asked = "the job file asks for it" if spec.strategy == "single" else "auto"
    if len(wanted) == 1:
        return best, 0, 1, f"{asked}: there is one device to train on, {best.id}"
    reason = (
        f"{asked}: of the {len(wanted)} devices that the job may use, {best.id} has "
        "most memory free"
    )
    return best, wanted.index(best), len(wanted), reason


def wanted_devices(spec: JobSpec) -> topology.Wanted:
    """The job file's ``devices`` as ``topology.select`` takes it."""
    match spec.devices:
        case Auto():
            return "auto"
        case Gpus(ids=ids):
            return "gpu" if ids is None else ids
        case Cpus():
            return "cpu"


# --- its memory ---------------------------------------------------------------------


def reserve_bytes(total_bytes: int | None) -> int:
    """Bytes of a GPU that stay outside TensorFlow's pool.

    The CUDA context, cuDNN and cuBLAS handles take a few hundred MiB whatever the
    card, and their workspaces grow with it: half a GiB, or 4 % of a large card.
    """
    return max(512 * _MIB, int((total_bytes or 0) * 0.04))


def limit_of(
    spec: JobSpec,
    inventory: Inventory,
    device: Device,
    index: int,
    count: int,
    notes: list[str],
) -> int | None:
    """Bytes that the device may use; None: no limit.

    Args:
        spec: what the user wrote.
        inventory: the machine now.
        device: one of it.
        index: its place among those that the job may use.
        count: how many these are.
        notes: is added to, in words for people.

    Raises:
        InfeasiblePlanError: there is none to set.
    """
    asked = _asked_bytes(spec, inventory, device, index, count)
    if device.kind == "cpu":
        free = inventory.host.free_bytes
        if asked is None:
            notes.append(f"{device.id} has no memory limit, so it has no budget either")
        elif asked > free:
            notes.append(
                f"the limit of {device.id} is {format_bytes(asked)}, but the host has "
                f"only {format_bytes(free)} free"
            )
        return asked
    if device.free_bytes is None:
        if asked is None:
            notes.append(f"the free memory of {device.id} cannot be read")
        return asked
    reserve = spec.memory.reserve
    kept = (
        reserve.count
        if isinstance(reserve, Bytes)
        else reserve_bytes(device.total_bytes)
    )
    available = device.free_bytes - kept
    if available <= 0:
        raise InfeasiblePlanError(
            f"{device.id} has less memory free than the reserve for the CUDA context "
            "and libraries: other processes hold the rest",
            needed_bytes=kept,
            available_bytes=device.free_bytes,
        )
    if asked is not None and asked > available:
        notes.append(
            f"the limit of {device.id} is {format_bytes(available)} instead of "
            f"{format_bytes(asked)}: that is what is free less the reserve"
        )
    return available if asked is None else min(asked, available)


def _asked_bytes(
    spec: JobSpec, inventory: Inventory, device: Device, index: int, count: int
) -> int | None:
    """The limit that the job file sets for this device."""
    limit = spec.memory.limit
    if isinstance(limit, tuple):
        wanted = spec.devices.count if isinstance(spec.devices, Cpus) else count
        if len(limit) != wanted:
            raise InfeasiblePlanError(
                f"memory.limit has {len(limit)} entries, but the job may use "
                f"{wanted} device{'s' if wanted > 1 else ''}: one for each is needed"
            )
        limit = limit[index]
    match limit:
        case Auto():
            return None
        case Bytes(count=size):
            return size
        case Share(fraction=fraction):
            total = (
                inventory.host.limit_bytes
                if device.kind == "cpu"
                else device.total_bytes
            )
            return None if total is None else int(total * fraction)


def amount(amount: Bytes | Share) -> int | float:
    """Bytes (int), or a fraction (float)."""
    return amount.count if isinstance(amount, Bytes) else amount.fraction


def check_room(device: Device, limit: int, budget: int, state: JobState) -> None:
    """Refuses a device that cannot hold the model alone.

    Raises:
        InfeasiblePlanError: it cannot.
    """
    if budget <= 0:
        raise InfeasiblePlanError(
            f"memory.headroom leaves nothing of {device.id}'s limit",
            available_bytes=limit,
        )
    if state.state_bytes is not None and state.state_bytes > limit:
        raise InfeasiblePlanError(
            f"the model's own state (weights, gradients, optimizer) is larger than the "
            f"limit of {device.id}",
            needed_bytes=state.state_bytes,
            available_bytes=limit,
        )


# --- the micro-batch ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known about sizes: ``ceiling`` is what was decided after an OOM."""

    share: int | None
    failed: int | None
    ceiling: int | None
    measured: Mapping[int, int]
    recorded: Mapping[int, int]
    state_bytes: int | None
    budget: int | None

    def predict(self, micro: int | None) -> memory.Peak | None:
        if micro is None:
            return None
        return memory.MemoryModel(
            state_bytes=self.state_bytes,
            measured=self.measured,
            recorded=Recorded(pools=self.recorded),
        ).predict(micro)

    def fits(self, micro: int) -> bool:
        """Not known to be too large."""
        if self.failed is not None and micro >= self.failed:
            return False
        peak = self.predict(micro)
        ran = micro in self.measured
        return ran or peak is None or self.budget is None or (
            peak.high_bytes <= self.budget
        )  # fmt: skip


def _micro_batch_size(
    spec: JobSpec, known: _Known, device: Device, notes: list[str]
) -> int | None:
    """Samples a pass, at most; None: the whole share, whatever it turns out to be."""
    micro = spec.batch.micro
    if isinstance(micro, int):
        return micro if known.share is None else min(micro, known.share)
    allowed = [known.share, micro.size if isinstance(micro, AtMost) else None]
    learnt = [known.ceiling, known.failed]
    most = min((size for size in allowed if size is not None), default=None)
    wanted = min((n for n in (*allowed, *learnt) if n is not None), default=None)
    if wanted is None:
        return None
    chosen = _largest_that_fits(wanted, known, device)
    if most is None or chosen < most:
        notes.append(_why_smaller(wanted, chosen, known, device))
    if isinstance(spec.program, Command) and known.share is not None:
        return _dividing(known.share, chosen, notes)
    return chosen


def _dividing(share: int, chosen: int, notes: list[str]) -> int:
    """The size for a command, which accumulates whole micro-batches only."""
    size = command.divisor(share, chosen)
    if size < chosen:
        notes.append(
            f"micro-batch {size} since a command's must divide the global batch "
            f"({share}), which {chosen} does not"
        )
    return size


def _largest_that_fits(wanted: int, known: _Known, device: Device) -> int:
    """``wanted``, or the first smaller size worth trying.

    Raises:
        InfeasiblePlanError: not even one sample at a time ran.
    """
    size = wanted
    if known.failed == known.ceiling == 1:
        return 1  # that was in a process that had come to hold other things as well
    if known.failed is not None and size >= known.failed:
        ran = max((n for n in known.measured if n < known.failed), default=0)
        size = batch.smaller_micro_batch(size, known.failed, ran)
    while size > 1 and not known.fits(size):
        ran = max((n for n in known.measured if n < size), default=0)
        size = batch.smaller_micro_batch(size, size, ran)
    if size < 1:
        raise InfeasiblePlanError(
            f"even one sample at a time does not fit on {device.id}",
            available_bytes=known.budget,
        )
    return size


def _why_smaller(wanted: int, chosen: int, known: _Known, device: Device) -> str:
    peak = known.predict(wanted)
    if chosen < wanted and peak is not None and wanted != known.failed:
        return (
            f"micro-batch {chosen} since {wanted} is predicted to need up to "
            f"{format_bytes(peak.high_bytes)} of {device.id}, above the budget of "
            f"{format_bytes(known.budget or 0)}"
        )
    if known.failed is not None:
        return f"micro-batch {chosen} since {known.failed} ran out of memory"
    return f"micro-batch {chosen} as decided after memory ran out"
