"""What a run is at, as data: for ``oomrun status --json``, metrics and the live view.

Covers: the state's devices with their current micro-batch, the JSON form of a state,
one sentence on how the run stands. Does not cover: printing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oomrun.core import batch, breakdown, levers, memory
from oomrun.core.state import RESTART_CAUSES, JobState

__all__ = [
    "DeviceStatus", "devices", "last_oom_report", "oom_number", "oom_report_path",
    "planned_devices", "shows_steps", "standing",
    "status_json",
]  # fmt: skip

_ACTIVE = frozenset(
    {"starting", "training", "evaluating", "checkpointing", "adapting", "recovering"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device of the current attempt; None where something is not known (yet).

    Attributes:
        rank: the worker that has the device.
        micro_batch_size: what it runs now, which may be less than was planned.
        accumulation_steps: micro-batches per optimizer step, at that size.
        predicted_peak_bytes: for the current micro-batch, made without having seen it.
        in_use_bytes: bytes allocated at the last report.
        window_peak_bytes: the highest peak at the current micro-batch.
        peak_bytes: the highest peak of the whole run.
    """

    id: str
    kind: str
    rank: int
    limit_bytes: int | None
    budget_bytes: int | None
    share: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    predicted_peak_bytes: int | None
    predicted_peak_high_bytes: int | None
    in_use_bytes: int | None
    window_peak_bytes: int | None
    peak_bytes: int | None

    @property
    def headroom_bytes(self) -> int | None:
        """What the limit leaves above the peak; None where one is not known."""
        if self.limit_bytes is None or self.window_peak_bytes is None:
            return None
        return self.limit_bytes - self.window_peak_bytes


def devices(state: JobState) -> list[DeviceStatus]:
    """The devices of the current plan, in its order."""
    planned = planned_devices(state.plan or {})
    return [_device(item, state, alone=len(planned) == 1) for item in planned]


def shows_steps(state: JobState) -> bool:
    """Whether a run reports its steps; a ``command`` does not."""
    program = state.mathematics.get("program")
    return not (isinstance(program, Mapping) and "command" in program)


def planned_devices(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A plan's devices as they stand in the journal; those that are none left out."""
    found = plan.get("devices")
    if not isinstance(found, list | tuple):
        return []
    return [item for item in found if isinstance(item, Mapping) and "id" in item]


def _device(
    planned: Mapping[str, Any], state: JobState, *, alone: bool
) -> DeviceStatus:
    identity = str(planned["id"])
    share = planned.get("share")
    if share is None and alone:
        share = state.global_batch_size
    size = state.micro_batch_size or planned.get("micro_batch_size")
    if identity in state.shares:
        share = state.shares[identity].share
        size = state.shares[identity].micro_batch_size
    if size is not None and share is not None:
        size = min(size, share)
    steps = batch.accumulation_steps(share, size) if share and size else None
    predicted = _prediction(planned, state, size)
    seen = state.memory.get(identity)
    limit = planned.get("limit_bytes")
    if limit is None and seen is not None:
        limit = seen.limit_bytes
    return DeviceStatus(
        id=identity,
        kind=str(planned.get("kind", "")),
        rank=int(planned.get("rank", 0)),
        limit_bytes=limit,
        budget_bytes=planned.get("budget_bytes"),
        share=share,
        micro_batch_size=size,
        accumulation_steps=steps,
        predicted_peak_bytes=predicted.bytes if predicted else None,
        predicted_peak_high_bytes=predicted.high_bytes if predicted else None,
        in_use_bytes=seen.in_use_bytes if seen else None,
        window_peak_bytes=state.tally.peaks.get(identity),
        peak_bytes=state.peaks.get(identity),
    )


def _prediction(
    planned: Mapping[str, Any], state: JobState, size: int | None
) -> memory.Peak | None:
    """The plan's prediction, or one of our own where the size was changed since."""
    if size is None:
        return None
    made = memory.peak_of(
        planned.get("predicted_peak_bytes"), planned.get("predicted_peak_high_bytes")
    )
    if size == planned.get("micro_batch_size") and made is not None:
        return made
    if size in state.predictions:
        return state.predictions[size]
    # A size that was measured would predict itself and say nothing of the error.
    others = {at: peak for at, peak in state.measured.items() if at != size}
    return memory.MemoryModel(state_bytes=state.state_bytes, measured=others).predict(
        size
    )


def status_json(state: JobState) -> dict[str, Any]:
    """The state as ``oomrun status --json`` prints it."""
    seen = shows_steps(state)
    return {
        "name": state.name,
        "run_id": state.run_id,
        "state": state.state,
        "exit_code": state.exit_code,
        "reason": state.reason,
        "attempts": state.attempt,
        "restarts": {cause: state.restarts.get(cause, 0) for cause in RESTART_CAUSES},
        "oom_events": state.oom_events,
        "in_process_recoveries": state.in_process_recoveries,
        "oom_report": last_oom_report(state),
        "step": state.step if seen else None,
        "samples": state.samples if seen else None,
        "epoch": state.epoch if seen else None,
        "epochs": state.epochs,
        "steps_per_epoch": state.steps_per_epoch,
        "loss": state.loss,
        "global_batch_size": state.global_batch_size,
        "devices": [_device_json(device) for device in devices(state)],
        "breakdown": _breakdown(state),
        "checkpoint": asdict(state.checkpoint) if state.checkpoint else None,
        "mirror": _mirror(state),
        "levers": list(levers.in_force(state)),
        "optimizer": _optimizer(state),
        "left_out": left_out(state),
        "last_decision": state.last_decision,
        "notes": _notes(state),
    }


def _mirror(state: JobState) -> dict[str, Any] | None:
    """The newest copy of a checkpoint at the job's URL, and failures on the way."""
    if state.mirrored is None and not state.mirror_failures:
        return None
    name, at = (state.mirrored.name, state.mirrored.at) if state.mirrored else ("", 0)
    return {"name": name or None, "at": at or None, "failures": state.mirror_failures}


def _optimizer(state: JobState) -> dict[str, Any] | None:
    """What is in the place of the script's own, and the bytes of slots of both."""
    found = state.optimizer
    keys = ("lever", "model", "written", "used", "written_bytes", "used_bytes")
    return {key: getattr(found, key) for key in keys} if found else None


def left_out(state: JobState) -> list[str]:
    """The devices that the job may use, but that do not hold its model."""
    return list(map(str, (state.plan or {}).get("left_out", ())))


def _breakdown(state: JobState) -> dict[str, Any] | None:
    """What the first device's predicted peak is made of, where that is known."""
    device = next(iter(devices(state)), None)
    found = device and breakdown.of_device(state.composition, device)
    return breakdown.to_json(found) if found else None


_DEVICE_KEYS = (
    "id", "kind", "limit_bytes", "budget_bytes", "share", "micro_batch_size",
    "accumulation_steps", "predicted_peak_bytes", "predicted_peak_high_bytes",
    "peak_bytes",
)  # fmt: skip


def _device_json(device: DeviceStatus) -> dict[str, Any]:
    return {key: getattr(device, key) for key in _DEVICE_KEYS}


def _notes(state: JobState) -> list[str]:
    told = [text for _, text in state.notes]
    known = [value for d in devices(state) for value in _device_json(d).values()]
    if None not in (state.global_batch_size, *known):
        return told  # the plan's notes say why something is not known
    return [*map(str, (state.plan or {}).get("notes", ())), *told]


def oom_number(state: JobState) -> int:
    """How often memory has run out, trials before training left out."""
    return sum(state.ooms.values())


def oom_report_path(attempt: int, number: int) -> str:
    """Where the report of the ``number``-th exhaustion is, within the run's folder."""
    return f"attempts/{attempt:04d}/oom-{number}.txt"


def last_oom_report(state: JobState) -> str | None:
    """Where the report of the last exhaustion is, if memory ever ran out."""
    number = oom_number(state)
    if not number:
        return None
    return oom_report_path(state.oom_attempt, number)


def standing(state: JobState, *, supervisor_alive: bool) -> str:
    """How the run stands, in one sentence."""
    if state.state == "pending":
        return "nothing has run yet"
    if state.state in _ACTIVE and not supervisor_alive:
        return (
            f"interrupted while {state.state}: no oomrun is running it; "
            "`oomrun job.yaml` resumes it"
        )
    if state.state in _ACTIVE:
        return state.state
    ending = f"{state.state}, exit code {state.exit_code}"
    return f"{ending}: {state.reason}" if state.reason else ending
