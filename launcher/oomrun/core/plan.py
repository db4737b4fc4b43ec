"""The plan: what we run, as opposed to the spec, which is what the user wrote.

Covers: the plan's values, their JSON form (the one ``oomrun plan --json`` prints).
Does not cover: how a plan is made from a spec and an inventory (``planning.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomrun.core.batch import accumulation_steps

__all__ = ["DevicePlan", "MemoryMode", "Plan", "from_json", "to_json"]

MemoryMode = str  # "growth" | "limit" | "preallocate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What one device is given.

    Attributes:
        id: ``cpu:0``, or a GPU's or MIG instance's UUID.
        kind: cpu, gpu or mig.
        limit_bytes: bytes that TensorFlow may use on it; None: no limit is set.
        budget_bytes: the limit less the headroom: what we plan to use.
        rank: its place among the devices; with a worker for each, that worker's.
        host: where it is: 0 is the supervisor's own, others are members of its gang.
        share: samples of each global batch; None until the script told its batch size.
        micro_batch_size: samples a pass; None until known ("the whole share").
        predicted_peak_bytes: the most likely peak; None until something ran.
        predicted_peak_high_bytes: the upper end that the plan is made to.
    """

    id: str
    kind: str
    limit_bytes: int | None
    budget_bytes: int | None
    rank: int = 0
    host: int = 0
    share: int | None = None
    micro_batch_size: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_peak_high_bytes: int | None = None

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches per optimizer step, or None while the batch is unknown."""
        if self.share is None or self.micro_batch_size is None:
            return None
        return accumulation_steps(self.share, self.micro_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One attempt's settings. The worker is given exactly this.

    ``left_out`` are devices that the job may use, but that do not hold its model.
    """

    strategy: str
    strategy_reason: str
    global_batch_size: int | None
    memory_mode: MemoryMode
    devices: tuple[DevicePlan, ...]
    notes: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as ``oomrun plan --json`` prints it."""
    return {
        "strategy": plan.strategy,
        "strategy_reason": plan.strategy_reason,
        "global_batch_size": plan.global_batch_size,
        "memory_mode": plan.memory_mode,
        "devices": [_device_json(device) for device in plan.devices],
        "notes": list(plan.notes),
        "levers": list(plan.levers),
        "left_out": list(plan.left_out),
    }


def _device_json(device: DevicePlan) -> dict[str, Any]:
    return {
        "id": device.id,
        "kind": device.kind,
        "rank": device.rank,
        "host": device.host,
        "limit_bytes": device.limit_bytes,
        "budget_bytes": device.budget_bytes,
        "share": device.share,
        "micro_batch_size": device.micro_batch_size,
        "accumulation_steps": device.accumulation_steps,
        "predicted_peak_bytes": device.predicted_peak_bytes,
        "predicted_peak_high_bytes": device.predicted_peak_high_bytes,
    }


def from_json(value: Mapping[str, Any]) -> Plan:
    """Reads a plan back (the worker does, from the attempt's ``plan.json``)."""
    return Plan(
        strategy=value["strategy"],
        strategy_reason=value["strategy_reason"],
        global_batch_size=value["global_batch_size"],
        memory_mode=value["memory_mode"],
        devices=tuple(
            DevicePlan(**{k: v for k, v in d.items() if k != "accumulation_steps"})
            for d in value["devices"]
        ),
        notes=tuple(value["notes"]),
        levers=tuple(value.get("levers", ())),
        left_out=tuple(value.get("left_out", ())),
    )
