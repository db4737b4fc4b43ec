"""The job's state: its journal summed up.

Covers: ``JobState``, ``JobState.after(event)``, ``replay``. Everything that status,
metrics, the live view and the policy know of a run, they know from here.
Does not cover: decisions (``policy.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from oomrun.core import events as ev
from oomrun.core import memory
from oomrun.core.tally import Tally

__all__ = ["RESTART_CAUSES", "Checkpoint", "JobState", "replay"]

#: The causes that restarts are counted by, in status, metrics and budgets.
RESTART_CAUSES = ("oom", "crash", "preemption", "hang")

_NO_RESTARTS: Mapping[str, int] = MappingProxyType(dict.fromkeys(RESTART_CAUSES, 0))
_OOM_CAUSES = frozenset({"device_oom", "host_oom"})
_TERMINAL = frozenset({"completed", "failed", "preempted"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The newest complete checkpoint."""

    name: str
    step: int
    samples: int
    epoch: int
    size_bytes: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A run so far. Counters cover the whole run, over all attempts and supervisors.

    Attributes:
        state: pending, starting, training, evaluating, checkpointing, adapting,
            recovering, completed, failed or preempted.
        restarts: attempts after the first, by what made them necessary.
        budget_used: restarts counted against ``recovery.max_restarts``: since the run
            was last started by a person, and for crashes since training last moved.
        micro_batch_failed: the smallest micro-batch that ran out of memory in
            training; None while none did.
        micro_batch_limit: the micro-batch that the next attempt must not exceed: what
            was last decided after memory ran out.
        limit_when_failed_bytes: the device's memory limit that both were seen under.
        measured: peak bytes by micro-batch size, the highest of all devices.
        last_training_step: the furthest step ever reported.
        tally: sums that only those who watch need.
    """

    run_id: str = ""
    name: str = ""
    seed: int = 0
    mathematics: Mapping[str, Any] = field(default_factory=dict)
    state: str = "pending"
    exit_code: int | None = None
    reason: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 0
    attempt_open: bool = False
    pids: tuple[int, ...] = ()
    plan: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=lambda: _NO_RESTARTS)
    budget_used: Mapping[str, int] = field(default_factory=lambda: _NO_RESTARTS)
    oom_events: int = 0
    ooms: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    in_process_recoveries: int = 0
    fit: int = 0
    step: int = 0
    samples: int = 0
    epoch: int = 0
    epochs: int | None = None
    step_in_epoch: int = 0
    steps_per_epoch: int | None = None
    loss: float | None = None
    step_s: float | None = None
    steps_timed: int = 0
    lost_steps: int = 0
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    micro_batch_failed: int | None = None
    micro_batch_limit: int | None = None
    limit_when_failed_bytes: int | None = None
    state_bytes: int | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    memory: Mapping[str, ev.DeviceMemory] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    checkpoint_failures: int = 0
    last_training_step: int = 0
    step_at_attempt_start: int = 0
    last_decision: str = ""
    script: ev.ScriptEnded | None = None
    last_oom: ev.OomOccurred | None = None
    notes: tuple[tuple[str, str], ...] = ()
    tally: Tally = field(default_factory=Tally)

    @property
    def terminal(self) -> bool:
        """Nothing goes on by itself any more."""
        return self.state in _TERMINAL

    def after(self, event: ev.Event) -> JobState:
        """The state after ``event``; never raises, whatever the order of events."""
        state = replace(self, tally=self.tally.after(event))
        match event:
            case ev.RunStarted():
                return _run_started(state, event)
            case ev.RunResumed():
                return replace(
                    state, state="starting", exit_code=None, ended_at=None,
                    attempt_open=False, pids=(), reason=event.reason,
                )  # fmt: skip
            case ev.AttemptStarted():
                return _attempt_started(state, event)
            case ev.WorkerReady():
                versions = {"tensorflow": event.tensorflow, "keras": event.keras}
                return replace(state, versions=versions)
            case ev.FitStarted():
                return _fit_started(state, event)
            case ev.Progressed():
                return _progressed(state, event)
            case ev.PhaseChanged():
                return replace(
                    state, state=event.phase, peaks=_peaks(state, event.memory)
                )
            case ev.OomOccurred():
                return _oom(state, event)
            case ev.MicroBatchChanged():
                return _micro_batch_changed(state, event)
            case ev.CheckpointSaved():
                return _checkpoint_saved(state, event)
            case ev.CheckpointFailed():
                return replace(
                    state,
                    checkpoint_failures=state.checkpoint_failures + 1,
                    notes=(*state.notes, ("checkpoint", event.reason)),
                )
            case ev.CheckpointRejected():
                text = f"{event.name}: {event.reason}"
                return replace(
                    state, notes=(*state.notes, ("checkpoint-rejected", text))
                )
            case ev.Restored():
                return replace(
                    state,
                    fit=event.fit,
                    step=event.step,
                    samples=event.samples,
                    step_at_attempt_start=event.step,
                    lost_steps=state.lost_steps + event.lost_steps,
                )
            case ev.Noted():
                return _noted(state, event)
            case ev.FitEnded():
                return replace(
                    state,
                    fit=event.fit,
                    step=event.step,
                    samples=event.samples,
                    epoch=event.epoch,
                    last_training_step=max(state.last_training_step, event.step),
                )
            case ev.ScriptEnded():
                return replace(state, script=event)
            case ev.AttemptEnded():
                ended = _unreported_oom(state, event)
                return replace(ended, attempt_open=False, pids=(), state="recovering")
            case ev.DecisionMade():
                return _decided(state, event)
            case ev.RunEnded():
                return replace(
                    state, state=event.state, exit_code=event.exit_code,
                    reason=event.reason, ended_at=event.at, attempt_open=False,
                )  # fmt: skip
            case _:
                return state


def replay(events: Iterable[ev.Event]) -> JobState:
    """The state that ``events`` add up to."""
    state = JobState()
    for event in events:
        state = state.after(event)
    return state


def _run_started(state: JobState, event: ev.RunStarted) -> JobState:
    return replace(
        state,
        run_id=event.run_id,
        name=event.name,
        seed=event.seed,
        mathematics=event.mathematics,
        state="starting",
        exit_code=None,
        reason="",
        started_at=state.started_at if state.started_at is not None else event.at,
        ended_at=None,
        attempt_open=False,
        budget_used=_NO_RESTARTS,
    )


def _attempt_started(state: JobState, event: ev.AttemptStarted) -> JobState:
    planned = event.plan.get("global_batch_size")
    batch = planned if isinstance(planned, int) else None
    return replace(
        state,
        state="starting",
        attempt=event.attempt,
        attempt_open=True,
        pids=event.pids,
        plan=event.plan,
        script=None,
        last_oom=None,
        memory={},
        global_batch_size=batch or state.global_batch_size,
        step_at_attempt_start=state.step,
    )


def _fit_started(state: JobState, event: ev.FitStarted) -> JobState:
    return replace(
        state,
        state="training",
        fit=event.fit,
        epochs=event.epochs,
        epoch=min(event.initial_epoch + 1, event.epochs),
        steps_per_epoch=event.steps_per_epoch,
        global_batch_size=event.global_batch_size or state.global_batch_size,
        micro_batch_size=event.micro_batch_size or state.micro_batch_size,
        state_bytes=event.state_bytes or state.state_bytes,
    )


def _progressed(state: JobState, event: ev.Progressed) -> JobState:
    measured = dict(state.measured)
    for device in event.memory:
        if device.peak_bytes is None:
            continue
        seen = measured.get(event.micro_batch_size, 0)
        measured[event.micro_batch_size] = max(seen, device.peak_bytes)
    moved = event.step > state.last_training_step
    used = {**state.budget_used, "crash": 0} if moved else state.budget_used
    return replace(
        state,
        state="training",
        fit=event.fit,
        step=event.step,
        samples=event.samples,
        epoch=event.epoch,
        step_in_epoch=event.step_in_epoch,
        loss=event.loss,
        step_s=event.step_s,
        steps_timed=state.steps_timed + event.window_steps,
        global_batch_size=event.global_batch_size,
        micro_batch_size=event.micro_batch_size,
        memory={**state.memory, **{d.device: d for d in event.memory}},
        peaks=_peaks(state, event.memory),
        measured=measured,
        last_training_step=max(state.last_training_step, event.step),
        budget_used=used,
    )


def _peaks(state: JobState, memory: tuple[ev.DeviceMemory, ...]) -> Mapping[str, int]:
    """The highest peak of each device so far, ``memory`` taken in."""
    peaks = dict(state.peaks)
    for device in memory:
        if device.peak_bytes is not None:
            peaks[device.device] = max(peaks.get(device.device, 0), device.peak_bytes)
    return peaks


def _micro_batch_changed(state: JobState, event: ev.MicroBatchChanged) -> JobState:
    state = replace(
        state,
        in_process_recoveries=state.in_process_recoveries + 1,
        last_decision=event.reason,
    )
    if event.phase != "gradients":
        return state
    return replace(
        state,
        state="training",
        micro_batch_size=event.new,
        micro_batch_limit=event.new,
    )


def _oom(state: JobState, event: ev.OomOccurred) -> JobState:
    key = (event.device, event.kind, event.phase)
    state = _without_old_failures(state)
    failed = state.micro_batch_failed
    training = event.phase in ("gradients", "apply", "build", "unknown")
    if training and event.micro_batch_size is not None:
        failed = min(event.micro_batch_size, failed or event.micro_batch_size)
    return replace(
        state,
        state="adapting" if event.recovery == "in_process" else "recovering",
        oom_events=state.oom_events + 1,
        ooms={**state.ooms, key: state.ooms.get(key, 0) + 1},
        micro_batch_failed=failed,
        last_oom=event,
        memory={**state.memory, **{d.device: d for d in event.memory}},
    )


def _unreported_oom(state: JobState, event: ev.AttemptEnded) -> JobState:
    """Counts memory that ran out and took the worker with it before it could say so."""
    told = state.last_oom
    if event.cause not in _OOM_CAUSES or (told and told.recovery == "restart"):
        return state
    host = event.cause == "host_oom"
    devices = (state.plan or {}).get("devices") or [{}]
    # Where the script itself said it, memory ran out outside of training.
    training = not host and state.script is None
    oom = ev.OomOccurred(
        at=event.at,
        attempt=event.attempt,
        rank=0,
        device="host" if host else str(devices[0].get("id", "")),
        kind="host" if host else "device",
        phase="unknown",
        recovery="restart",
        micro_batch_size=state.micro_batch_size if training else None,
        step=state.step,
        message=event.summary,
    )
    return _oom(state, oom)


def _without_old_failures(state: JobState) -> JobState:
    """What failed under a clearly lower limit says nothing any more."""
    now = _planned_limit_bytes(state.plan)
    if memory.limit_grew(state.limit_when_failed_bytes, now):
        state = replace(state, micro_batch_failed=None, micro_batch_limit=None)
    return replace(state, limit_when_failed_bytes=now)


def _planned_limit_bytes(plan: Mapping[str, Any] | None) -> int | None:
    """The first device's limit in a plan as the journal has it, whatever it holds."""
    devices = plan.get("devices") if plan is not None else None
    if not isinstance(devices, list | tuple) or not devices:
        return None
    limit = devices[0].get("limit_bytes") if isinstance(devices[0], Mapping) else None
    return limit if isinstance(limit, int) else None


def _checkpoint_saved(state: JobState, event: ev.CheckpointSaved) -> JobState:
    return replace(
        state,
        state="training" if state.state == "checkpointing" else state.state,
        checkpoint=Checkpoint(
            name=event.name,
            step=event.step,
            samples=event.samples,
            epoch=event.epoch,
            size_bytes=event.size_bytes,
            at=event.at,
        ),
    )


def _noted(state: JobState, event: ev.Noted) -> JobState:
    if (event.code, event.text) in state.notes or len(state.notes) >= 99:
        return state
    return replace(state, notes=(*state.notes, (event.code, event.text)))


def _decided(state: JobState, event: ev.DecisionMade) -> JobState:
    restarts, used = dict(state.restarts), dict(state.budget_used)
    if event.action == "restart" and event.cause in restarts:
        restarts[event.cause] += 1
        used[event.cause] += 1
    return replace(
        state,
        restarts=restarts,
        budget_used=used,
        last_decision=event.reason,
        micro_batch_size=event.micro_batch_size or state.micro_batch_size,
        micro_batch_limit=event.micro_batch_size or state.micro_batch_limit,
        limit_when_failed_bytes=_planned_limit_bytes(state.plan)
        if event.micro_batch_size
        else state.limit_when_failed_bytes,
        state="recovering" if event.action == "restart" else state.state,
    )
