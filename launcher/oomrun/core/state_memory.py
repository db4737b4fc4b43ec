"""What events say of memory, summed up into the job's state.

Covers: peaks, what ran out of memory, what was tried, which micro-batch is in use.
Does not cover: what follows from it (``planning.py``, ``policy.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomrun.core import events as ev
from oomrun.core import memory
from oomrun.core.spec import OPTIMIZERS
from oomrun.core.tally import Traced
from oomrun.core.topology import HOST_ID

if TYPE_CHECKING:
    from oomrun.core.state import JobState

__all__ = [
    "device_ids", "devices_left_out", "leak_found", "levers_changed", "limits_of",
    "measured", "micro_batch_changed", "micro_batch_planned", "on_devices",
    "out_of_memory", "peaks", "planned_limit_bytes", "probed", "trained",
    "unreported_oom",
]  # fmt: skip

_OOM_CAUSES = frozenset({"device_oom", "host_oom"})


def probed(state: JobState, event: ev.Probed) -> JobState:
    """A micro-batch was tried."""
    size = event.micro_batch_size
    if event.peak_bytes is not None:
        recorded = dict(state.recorded)
        if event.pool_bytes is not None:
            recorded[size] = max(recorded.get(size, 0), event.pool_bytes)
        peaks = measured(state, size, event.peak_bytes)
        return replace(state, measured=peaks, recorded=recorded)
    failed = min(size, state.micro_batch_failed or size)
    return replace(
        state,
        oom_events=state.oom_events + 1,
        micro_batch_failed=failed,
        limit_when_failed_bytes=planned_limit_bytes(state.plan),
    )


def measured(state: JobState, size: int, peak_bytes: int) -> Mapping[int, int]:
    """The peaks by micro-batch size, with one more seen."""
    highest = max(state.measured.get(size, 0), peak_bytes)
    return {**state.measured, size: highest}


def trained(state: JobState, event: ev.Progressed) -> Mapping[int, int]:
    """The peaks by micro-batch size, with that of the last steps.

    What a leak keeps is no step's need, from when on it is known that there is one.
    """
    took = [
        device.peak_bytes - _kept_bytes(state, device)
        for device in event.memory
        if device.peak_bytes is not None
    ]
    if not took:
        return state.measured
    return measured(state, event.micro_batch_size, max(1, *took))


def _kept_bytes(state: JobState, device: ev.DeviceMemory) -> int:
    """What a leak that is known of holds of the device now."""
    at_rest = state.at_rest.get(device.device)
    if at_rest is None or device.in_use_bytes is None:
        return 0
    return max(0, device.in_use_bytes - at_rest)


def micro_batch_planned(state: JobState, event: ev.MicroBatchPlanned) -> JobState:
    """The worker has chosen its micro-batch."""
    predictions = dict(state.predictions)
    likely, high = event.predicted_peak_bytes, event.predicted_peak_high_bytes
    if likely is not None:
        peak = memory.Peak(bytes=likely, high_bytes=max(likely, high or 0))
        predictions[event.micro_batch_size] = peak
    return replace(
        state,
        micro_batch_size=event.micro_batch_size,
        global_batch_size=event.global_batch_size,
        predictions=predictions,
        last_decision=event.reason,
    )


def peaks(state: JobState, memory: tuple[ev.DeviceMemory, ...]) -> Mapping[str, int]:
    """The highest peak of each device so far, ``memory`` taken in."""
    peaks = dict(state.peaks)
    for device in memory:
        if device.peak_bytes is not None:
            peaks[device.device] = max(peaks.get(device.device, 0), device.peak_bytes)
    return peaks


def micro_batch_changed(state: JobState, event: ev.MicroBatchChanged) -> JobState:
    grown = event.new > event.old
    state = replace(
        state,
        in_process_recoveries=state.in_process_recoveries + (not grown),
        last_decision=event.reason,
    )
    if event.phase != "gradients":
        return state
    return replace(
        state,
        # Something else had taken the memory of what it has grown back to.
        micro_batch_failed=None if grown else state.micro_batch_failed,
        state="training",
        micro_batch_size=event.new,
        micro_batch_limit=event.new,
    )


def out_of_memory(state: JobState, event: ev.OomOccurred) -> JobState:
    key = (event.device, event.kind, event.phase)
    state = _without_old_failures(state)
    failed, by_rank = state.micro_batch_failed, state.failed_by_rank
    training = event.phase in ("gradients", "apply", "build", "unknown")
    if training and event.micro_batch_size is not None and event.rank > 0:
        before = by_rank.get(event.rank, event.micro_batch_size)
        smallest = min(event.micro_batch_size, before)
        by_rank = {**by_rank, event.rank: smallest}
    elif training and event.micro_batch_size is not None:
        failed = min(event.micro_batch_size, failed or event.micro_batch_size)
    return replace(
        state,
        state="adapting" if event.recovery == "in_process" else "recovering",
        oom_events=state.oom_events + 1,
        # The first worker tells of its own: what its micro-batch changes to.
        in_process_recoveries=state.in_process_recoveries
        + (event.rank > 0 and event.recovery == "in_process"),
        ooms={**state.ooms, key: state.ooms.get(key, 0) + 1},
        traces={
            **state.traces,
            key: Traced(attempt=event.attempt, step=event.step, at=event.at),
        },
        oom_attempt=event.attempt,
        micro_batch_failed=failed,
        failed_by_rank=by_rank,
        last_oom=event,
        memory={**state.memory, **{d.device: d for d in event.memory}},
    )


def fit_started(state: JobState, event: ev.FitStarted) -> JobState:
    """What is known of sizes is of one model."""
    other = not _same_model(state, event)  # of which nothing is known yet
    return replace(
        state,
        state="training",
        measured={} if other else state.measured,
        at_rest={} if other else state.at_rest,
        recorded={} if other else state.recorded,
        predictions={} if other else state.predictions,
        composition=None if other else state.composition,
        micro_batch_failed=None if other else state.micro_batch_failed,
        failed_by_rank={} if other else state.failed_by_rank,
        micro_batch_limit=None if other else state.micro_batch_limit,
        fit=event.fit,
        epochs=event.epochs,
        epoch=min(event.initial_epoch + 1, event.epochs),
        steps_per_epoch=event.steps_per_epoch,
        global_batch_size=event.global_batch_size or state.global_batch_size,
        micro_batch_size=event.micro_batch_size or state.micro_batch_size,
        state_bytes=event.state_bytes or state.state_bytes,
        profile_key=event.profile_key,
        in_loop=event.custom_loop,
    )


def _same_model(state: JobState, event: ev.FitStarted) -> bool:
    if event.profile_key is None:
        return event.fit == state.fit or event.state_bytes == state.state_bytes
    return event.profile_key == state.profile_key


def leak_found(state: JobState, event: ev.LeakFound) -> JobState:
    """What was in use between steps is not what a step needs."""
    if event.device == HOST_ID:
        return replace(state, last_leak=event)
    size, measured = state.micro_batch_size, dict(state.measured)
    if size in measured:
        measured[size] = max(1, measured[size] - event.grown_bytes)
    failed = state.micro_batch_failed
    return replace(
        state,
        last_leak=event,
        at_rest=_at_rest(state, event),
        measured=measured,
        # It had run: had nothing grown, it would run on.
        micro_batch_failed=None if failed in measured else failed,
    )


def _at_rest(state: JobState, leak: ev.LeakFound) -> Mapping[str, int]:
    """``JobState.at_rest`` with what was in use before ``leak`` had kept anything."""
    name, known = leak.device, state.at_rest
    device = state.memory.get(name)
    if device is None or device.in_use_bytes is None:
        return known
    begun = max(0, device.in_use_bytes - leak.grown_bytes)
    return {**known, name: min(begun, known.get(name, begun))}


def levers_changed(state: JobState, event: ev.DecisionMade) -> JobState:
    """What was known of sizes was known of another step."""
    levers = event.levers or ()
    taken_back = len(levers) < len(state.levers)
    failed = state.failed_before_lever if taken_back else None
    slots = any(name in OPTIMIZERS for name in {*levers} ^ {*state.levers})
    return replace(
        state,
        levers=levers,
        levers_tried=state.levers_tried.union(levers),
        optimizer=None,
        state_bytes=None if slots else state.state_bytes,
        composition=None if slots else state.composition,
        lever_attempt=0 if taken_back else event.attempt + 1,
        ran_before_lever=max(state.measured, default=0),
        failed_before_lever=state.micro_batch_failed,
        measured={},
        at_rest={},
        recorded={},
        predictions={},
        micro_batch_failed=failed,
        failed_by_rank={},
        micro_batch_limit=None,
    )


def unreported_oom(state: JobState, event: ev.AttemptEnded) -> JobState:
    """Counts memory that ran out and took the worker with it before it could say so."""
    told = state.last_oom
    # After one that was recovered from in process, it was another one.
    if event.cause not in _OOM_CAUSES or (told and told.recovery != "in_process"):
        return state
    host = event.cause == "host_oom"
    ids = device_ids(state.plan) or [""]
    device = ids[min(_place_of(state, event), len(ids) - 1)]
    # Where the script itself said it, memory ran out outside of training.
    training = not host and state.script is None
    oom = ev.OomOccurred(
        at=event.at,
        attempt=event.attempt,
        rank=event.rank,
        device=HOST_ID if host else device,
        kind="host" if host else "device",
        phase="unknown",
        recovery="restart",
        micro_batch_size=_size_in_use(state, event.rank, device) if training else None,
        step=state.step,
        message=event.summary,
    )
    return out_of_memory(state, oom)


def _place_of(state: JobState, event: ev.AttemptEnded) -> int:
    """Which of the plan's devices it was, as far as that can be told."""
    if (state.plan or {}).get("strategy") != "mirrored" or state.script is None:
        return event.rank
    named = re.search(r"/device:[A-Z]+:(\d{1,4})\b", state.script.message)
    return int(named[1]) if named else 0


def _size_in_use(state: JobState, rank: int, device: str) -> int | None:
    if rank == 0:
        return state.micro_batch_size
    share = state.shares.get(device)
    return share.micro_batch_size if share is not None else None


def devices_left_out(state: JobState, ids: tuple[str, ...]) -> JobState:
    """The run goes on without these, until they have clearly more memory."""
    now = dict(zip(device_ids(state.plan), limits_of(state.plan), strict=True))
    limits = {one: now.get(one, state.left_out.get(one)) for one in ids}
    return replace(state, left_out=limits)


def on_devices(state: JobState, ids: Sequence[str]) -> JobState:
    """The state for an attempt on these devices: what failed goes with its device.

    A first device that was in no plan before is taken to be like the one before it.
    """
    before = {one: rank for rank, one in enumerate(device_ids(state.plan))}
    if list(before) == list(ids) or ids[:1] == [] or ids[0] not in before:
        return state
    failed = {0: state.micro_batch_failed, **state.failed_by_rank}
    now = {rank: failed.get(before.get(one, -1)) for rank, one in enumerate(ids)}
    state = replace(
        state,
        failed_by_rank={rank: n for rank, n in now.items() if rank and n is not None},
    )
    if before[ids[0]] == 0:
        return state
    return replace(
        state,
        micro_batch_failed=now[0],
        micro_batch_limit=None,
        limit_when_failed_bytes=limits_of(state.plan)[before[ids[0]]],
    )


def _without_old_failures(state: JobState) -> JobState:
    """What failed under a clearly lower limit says nothing any more."""
    now = planned_limit_bytes(state.plan)
    if memory.limit_grew(state.limit_when_failed_bytes, now):
        state = replace(state, micro_batch_failed=None, micro_batch_limit=None)
    return replace(state, limit_when_failed_bytes=now)


def device_ids(plan: Mapping[str, Any] | None) -> list[str]:
    """The devices of a plan as the journal has it, in their order."""
    return [str(device.get("id", "")) for device in _devices(plan)]


def limits_of(plan: Mapping[str, Any] | None) -> list[int | None]:
    """The limits of a plan's devices as the journal has it, in their order."""
    found = [device.get("limit_bytes") for device in _devices(plan)]
    return [limit if isinstance(limit, int) else None for limit in found]


def _devices(plan: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    devices = plan.get("devices") if plan is not None else None
    listed = devices if isinstance(devices, list | tuple) else ()
    return [device for device in listed if isinstance(device, Mapping)]


def planned_limit_bytes(plan: Mapping[str, Any] | None) -> int | None:
    """The first device's limit in a plan as the journal has it, whatever it holds."""
    return next(iter(limits_of(plan)), None)
