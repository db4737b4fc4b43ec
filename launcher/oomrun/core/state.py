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
from oomrun.core import memory, state_memory
from oomrun.core.tally import Tally, Traced

__all__ = ["RESTART_CAUSES", "Checkpoint", "JobState", "replay"]

#: The causes that restarts are counted by, in status, metrics and budgets.
RESTART_CAUSES = ("oom", "crash", "preemption", "hang", "leak")

_NO_RESTARTS: Mapping[str, int] = MappingProxyType(dict.fromkeys(RESTART_CAUSES, 0))
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
        failed_by_rank: the same as ``micro_batch_failed`` of each worker of a group
            but the first.
        failed_rank: the worker that the last attempt ended with.
        shares: what each device does of a global batch, in a group of workers.
        measured: peak bytes by micro-batch size, the highest of all devices, of the
            model of the current fit.
        at_rest: bytes in use between steps before anything was kept, of each device
            that a leak of this model was found on.
        recorded: the least pool that has room for a step, by micro-batch size, of those
            whose allocations were recorded.
        predictions: the peaks that were predicted, by micro-batch size.
        composition: what the memory of the current fit's model is made of.
        mirrored: the checkpoint that was copied to the job's URL last.
        mirror_failures: how often one could not be copied.
        last_training_step: the furthest step ever reported.
        reached_step: the furthest since training was last put back to a checkpoint.
        script: how the current attempt's script ended.
        ended_before: the same of the attempt before, since a person started the run,
            and its last step.
        leaks_in_place: restarts for a leak since training last moved.
        last_cause: why the last attempt that has ended did so, a ``Cause``'s value.
        levers: what was changed to save memory beside the micro-batch, in this order.
        levers_tried: those, and the ones that were taken back.
        lever_attempt: the first attempt with the last of them.
        ran_before_lever: the largest micro-batch that had run when it was pulled.
        failed_before_lever: the smallest that had not.
        left_out: devices that the run goes on without, with the limit under which not
            even one sample fitted.
        optimizer: what is in the place of the script's own; None: nothing is.
        in_loop: the current fit is a loop of ``oomrun.Loop``.
        traces: the last event that each of ``ooms`` and ``restarts`` grew by, under
            the same keys.
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
    oom_attempt: int = 0
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
    failed_by_rank: Mapping[int, int] = field(default_factory=dict)
    failed_rank: int = 0
    shares: Mapping[str, ev.SharePlanned] = field(default_factory=dict)
    state_bytes: int | None = None
    profile_key: str | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    at_rest: Mapping[str, int] = field(default_factory=dict)
    recorded: Mapping[int, int] = field(default_factory=dict)
    predictions: Mapping[int, memory.Peak] = field(default_factory=dict)
    composition: ev.StateMeasured | None = None
    memory: Mapping[str, ev.DeviceMemory] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    checkpoint_failures: int = 0
    mirrored: ev.CheckpointMirrored | None = None
    mirror_failures: int = 0
    last_training_step: int = 0
    reached_step: int = 0
    step_at_attempt_start: int = 0
    last_decision: str = ""
    last_cause: str = ""
    script: ev.ScriptEnded | None = None
    ended_before: tuple[ev.ScriptEnded, int] | None = None
    last_oom: ev.OomOccurred | None = None
    last_leak: ev.LeakFound | None = None
    leaks_in_place: int = 0
    notes: tuple[tuple[str, str], ...] = ()
    levers: tuple[str, ...] = ()
    levers_tried: frozenset[str] = frozenset()
    lever_attempt: int = 0
    ran_before_lever: int = 0
    failed_before_lever: int | None = None
    left_out: Mapping[str, int | None] = field(default_factory=dict)
    optimizer: ev.OptimizerReplaced | None = None
    in_loop: bool = False
    traces: Mapping[object, Traced] = field(default_factory=dict)
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
                return state_memory.fit_started(state, event)
            case ev.Progressed():
                return _progressed(state, event)
            case ev.PhaseChanged():
                return replace(
                    state,
                    state=event.phase,
                    peaks=state_memory.peaks(state, event.memory),
                )
            case ev.PeakRose():
                return replace(state, peaks=state_memory.peaks(state, event.memory))
            case ev.OomOccurred():
                return state_memory.out_of_memory(state, event)
            case ev.LeakFound():
                return state_memory.leak_found(state, event)
            case ev.Probed():
                return state_memory.probed(state, event)
            case ev.StateMeasured():
                return replace(state, composition=event)
            case ev.OptimizerReplaced():
                return replace(state, optimizer=event)
            case ev.MicroBatchPlanned():
                return state_memory.micro_batch_planned(state, event)
            case ev.SharePlanned():
                return replace(state, shares={**state.shares, event.device: event})
            case ev.MicroBatchChanged():
                return state_memory.micro_batch_changed(state, event)
            case ev.CheckpointSaved():
                return _checkpoint_saved(state, event)
            case ev.CheckpointFailed():
                return replace(
                    state,
                    checkpoint_failures=state.checkpoint_failures + 1,
                    # The last one only: a disk that stays full says it all night.
                    notes=(
                        *(note for note in state.notes if note[0] != "checkpoint"),
                        ("checkpoint", event.reason),
                    ),
                )
            case ev.CheckpointMirrored():
                return replace(state, mirrored=event)
            case ev.MirrorFailed():
                return replace(state, mirror_failures=state.mirror_failures + 1)
            case ev.CheckpointsFetched():
                tried = state.levers_tried.union(event.levers)
                levers = event.levers or state.levers
                return replace(state, levers=levers, levers_tried=tried)
            case ev.CheckpointRejected():
                text = f"{event.name}: {event.reason}"
                return _noted(state, "checkpoint-rejected", text)
            case ev.Restored():
                return replace(
                    state, fit=event.fit, step=event.step, samples=event.samples,
                    step_at_attempt_start=event.step, reached_step=event.step,
                    lost_steps=state.lost_steps + event.lost_steps,
                )  # fmt: skip
            case ev.Noted():
                return _noted(state, event.code, event.text)
            case ev.FitEnded():
                return replace(
                    state,
                    fit=event.fit,
                    step=event.step,
                    samples=event.samples,
                    epoch=event.epoch,
                    last_training_step=max(state.last_training_step, event.step),
                    reached_step=max(state.reached_step, event.step),
                )
            case ev.ScriptEnded():
                return replace(state, script=event)
            case ev.AttemptEnded():
                ended = state_memory.unreported_oom(state, event)
                return replace(
                    ended, attempt_open=False, pids=(), state="recovering",
                    failed_rank=event.rank, last_cause=event.cause,
                )  # fmt: skip
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
        script=None,
        budget_used=_NO_RESTARTS,
    )


def _attempt_started(state: JobState, event: ev.AttemptStarted) -> JobState:
    planned = event.plan.get("global_batch_size")
    batch = planned if isinstance(planned, int) else None
    state = state_memory.on_devices(state, state_memory.device_ids(event.plan))
    return replace(
        state,
        state="starting",
        attempt=event.attempt,
        attempt_open=True,
        pids=event.pids,
        plan=event.plan,
        script=None,
        ended_before=None if state.script is None else (state.script, state.step),
        last_oom=None,
        last_leak=None,
        memory={},
        shares={},
        global_batch_size=batch or state.global_batch_size,
        step_at_attempt_start=state.step,
    )


def _progressed(state: JobState, event: ev.Progressed) -> JobState:
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
        peaks=state_memory.peaks(state, event.memory),
        measured=state_memory.trained(state, event),
        last_training_step=max(state.last_training_step, event.step),
        reached_step=max(state.reached_step, event.step),
        # An attempt that found no checkpoint began below where the last one was.
        step_at_attempt_start=max(
            0, min(state.step_at_attempt_start, event.step - event.window_steps)
        ),
        budget_used=used,
        leaks_in_place=0 if moved else state.leaks_in_place,
    )


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


def _noted(state: JobState, code: str, text: str) -> JobState:
    if (code, text) in state.notes or len(state.notes) >= 99:
        return state
    return replace(state, notes=(*state.notes, (code, text)))


def _decided(state: JobState, event: ev.DecisionMade) -> JobState:
    restarts, used = dict(state.restarts), dict(state.budget_used)
    traces = state.traces
    if event.action == "restart" and event.cause in restarts:
        restarts[event.cause] += 1
        used[event.cause] += 1
        trace = Traced(attempt=event.attempt, step=state.step, at=event.at)
        traces = {**traces, event.cause: trace}
    if event.levers is not None and event.levers != state.levers:
        state = state_memory.levers_changed(state, event)
    if event.left_out is not None:
        state = state_memory.devices_left_out(state, event.left_out)
    return replace(
        state,
        traces=traces,
        restarts=restarts,
        budget_used=used,
        leaks_in_place=state.leaks_in_place
        + (event.action == "restart" and event.cause == "leak"),
        last_decision=event.reason,
        micro_batch_size=event.micro_batch_size or state.micro_batch_size,
        micro_batch_limit=event.micro_batch_size or state.micro_batch_limit,
        limit_when_failed_bytes=state_memory.planned_limit_bytes(state.plan)
        if event.micro_batch_size
        else state.limit_when_failed_bytes,
        state="recovering" if event.action == "restart" else state.state,
    )
