"""What a run adds up to over all its attempts, for those who watch it.

Covers: counts and durations that only metrics, views and reports need, as a function
of the events alone. Does not cover: what decisions are made from (``state.py``).

Steps and samples are counted as they are trained, so steps that were lost and trained
again count twice: that is what the devices did. ``JobState.step`` says where a run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from oomrun.core import events as ev
from oomrun.core.histogram import (
    CHECKPOINT_BOUNDS_S,
    RECOVERY_BOUNDS_S,
    STEP_BOUNDS_S,
    Histogram,
)

__all__ = [
    "ADAPTATIONS", "IN_PROCESS", "LOSS_REASONS", "RECOVERY_REASONS", "Tally", "Traced",
]  # fmt: skip

#: Why steps are lost: what made the restart necessary, or that a new supervisor took
#: over.
LOSS_REASONS = ("oom", "crash", "preemption", "hang", "leak", "resume")
#: The recovery that needs no restart.
IN_PROCESS = "in_process"
#: What a run recovers from. After a resume nobody knows how long it lay still.
RECOVERY_REASONS = (IN_PROCESS, *LOSS_REASONS[:-1])
#: Every change of settings there is: what, in which direction, and why.
ADAPTATIONS = (
    ("micro_batch", "shrink", "oom"),
    ("micro_batch", "shrink", "leak"),
    ("micro_batch", "grow", "headroom"),
    ("evaluation_batch", "shrink", "oom"),
    ("evaluation_batch", "grow", "headroom"),
)

_WITHOUT_TRAINING = frozenset({"evaluate", "predict"})
_NO_STEPS = Histogram.empty(STEP_BOUNDS_S)
_NO_CHECKPOINTS = Histogram.empty(CHECKPOINT_BOUNDS_S)
_NO_RECOVERIES: Mapping[str, Histogram] = MappingProxyType(
    {reason: Histogram.empty(RECOVERY_BOUNDS_S) for reason in RECOVERY_REASONS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Where in a run something happened, for those who see only that it was counted."""

    attempt: int
    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over a run so far; nothing in it ever falls, except what says so.

    Attributes:
        resumes: how often a new supervisor took the run over.
        steps, samples: trained, repeated ones included.
        step_times: each window's steps at the window's mean.
        recovery_times: from what stopped training to the first progress after it.
        adaptations: by action, direction and trigger, as in ``ADAPTATIONS``.
        lost_steps: steps to train again, by one of ``LOSS_REASONS``.
        heartbeats: when each rank was last heard of.
        peaks: the highest peak of each device since the micro-batch last changed or
            an attempt began (falls then): a scrape every 15 s misses none of them.
        position: step and samples that training stands at; None until it is known.
        interrupted: why and when training stood still, until it moves again.
    """

    resumes: int = 0
    steps: int = 0
    samples: int = 0
    step_times: Histogram = _NO_STEPS
    checkpoint_times: Histogram = _NO_CHECKPOINTS
    recovery_times: Mapping[str, Histogram] = field(
        default_factory=lambda: _NO_RECOVERIES
    )
    adaptations: Mapping[tuple[str, str, str], int] = field(
        default_factory=lambda: MappingProxyType(dict.fromkeys(ADAPTATIONS, 0))
    )
    lost_steps: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType(dict.fromkeys(LOSS_REASONS, 0))
    )
    heartbeats: Mapping[int, float] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
    micro_batch_size: int | None = None
    position: tuple[int, int] | None = None
    restart_reason: str = "resume"
    interrupted: tuple[str, float] | None = None

    def after(self, event: ev.Event) -> Tally:
        """The sums after ``event``; never raises, whatever the order of events."""
        rank = _heard_of(event)
        tally = self
        if rank is not None:
            tally = replace(tally, heartbeats={**tally.heartbeats, rank: event.at})
        match event:
            case ev.RunStarted():
                return replace(tally, restart_reason="resume", interrupted=None)
            case ev.RunResumed():
                return replace(
                    tally,
                    resumes=tally.resumes + 1,
                    restart_reason="resume",
                    interrupted=None,
                )
            case ev.AttemptStarted():
                return replace(tally, peaks={}, position=None)
            case ev.FitStarted():
                size = event.micro_batch_size or tally.micro_batch_size
                return _at_micro_batch(tally, size)
            case ev.Progressed():
                return _progressed(tally, event)
            case ev.OomOccurred() if event.phase not in _WITHOUT_TRAINING:
                return _interrupted(tally, IN_PROCESS, event.at)
            case ev.MicroBatchPlanned():
                return _at_micro_batch(tally, event.micro_batch_size)
            case ev.MicroBatchChanged():
                return _micro_batch_changed(tally, event)
            case ev.CheckpointSaved():
                times = tally.checkpoint_times.observe(event.duration_s)
                return replace(tally, checkpoint_times=times)
            case ev.Restored():
                lost = dict(tally.lost_steps)
                lost[tally.restart_reason] = lost.get(tally.restart_reason, 0) + max(
                    0, event.lost_steps
                )
                position = (event.step, event.samples)
                return replace(tally, lost_steps=lost, position=position)
            case ev.FitEnded():
                moved = tally if event.replayed else _trained(tally, event, None)
                return replace(moved, position=(event.step, event.samples))
            case ev.AttemptEnded():
                return _interrupted(tally, IN_PROCESS, event.at)
            case ev.DecisionMade():
                return _decided(tally, event)
            case _:
                return tally


def _heard_of(event: ev.Event) -> int | None:
    """The rank that reported ``event``, None where the supervisor itself did."""
    match event:
        case (
            ev.WorkerReady()
            | ev.OomOccurred()
            | ev.PeakRose()
            | ev.ScriptEnded()
            | ev.SharePlanned()
        ):
            return event.rank
        case (
            ev.FitStarted()
            | ev.Progressed()
            | ev.PhaseChanged()
            | ev.LeakFound()
            | ev.Probed()
            | ev.StateMeasured()
            | ev.MicroBatchPlanned()
            | ev.MicroBatchChanged()
            | ev.CheckpointSaved()
            | ev.CheckpointFailed()
            | ev.CheckpointRejected()
            | ev.Restored()
            | ev.FitEnded()
            | ev.OptimizerReplaced()
            | ev.CheckpointMirrored()
            | ev.MirrorFailed()
        ):
            return 0  # only the first rank reports for all
        case _:
            return None


def _interrupted(tally: Tally, reason: str, at: float) -> Tally:
    """What stopped training first is when it stopped."""
    if tally.interrupted is not None:
        return tally
    return replace(tally, interrupted=(reason, at))


def _at_micro_batch(tally: Tally, size: int | None) -> Tally:
    if size == tally.micro_batch_size:
        return tally
    return replace(tally, micro_batch_size=size, peaks={})


def _trained(
    tally: Tally, event: ev.Progressed | ev.FitEnded, window: tuple[int, int] | None
) -> Tally:
    """Counts the way from the last known position, or else ``window``."""
    steps, samples = window or (0, 0)
    if tally.position is not None:
        steps = event.step - tally.position[0]
        samples = event.samples - tally.position[1]
    return replace(
        tally,
        steps=tally.steps + max(0, steps),
        samples=tally.samples + max(0, samples),
        position=(event.step, event.samples),
    )


def _progressed(tally: Tally, event: ev.Progressed) -> Tally:
    window = (event.window_steps, event.window_steps * event.global_batch_size)
    moved = _trained(_at_micro_batch(tally, event.micro_batch_size), event, window)
    peaks = dict(moved.peaks)
    for device in event.memory:
        if device.peak_bytes is not None:
            peaks[device.device] = max(peaks.get(device.device, 0), device.peak_bytes)
    times = moved.recovery_times
    if moved.interrupted is not None:
        reason, since = moved.interrupted
        before = times.get(reason) or Histogram.empty(RECOVERY_BOUNDS_S)
        # A clock that was set back in between must not stop the count.
        times = {**times, reason: before.observe(max(0.0, event.at - since))}
    return replace(
        moved,
        step_times=moved.step_times.observe(event.step_s, event.window_steps),
        recovery_times=times,
        interrupted=None,
        peaks=peaks,
    )


def _micro_batch_changed(tally: Tally, event: ev.MicroBatchChanged) -> Tally:
    training = event.phase not in _WITHOUT_TRAINING
    action = "micro_batch" if training else "evaluation_batch"
    if event.new != event.old:
        tally = _adapted(tally, action, "oom", shrink=event.new < event.old)
    return _at_micro_batch(tally, event.new) if training else tally


def _adapted(tally: Tally, action: str, why: str, *, shrink: bool) -> Tally:
    key = (action, *(("shrink", why) if shrink else ("grow", "headroom")))
    count = tally.adaptations.get(key, 0) + 1
    return replace(tally, adaptations={**tally.adaptations, key: count})


def _decided(tally: Tally, event: ev.DecisionMade) -> Tally:
    if event.action != "restart":
        return replace(tally, interrupted=None)
    cause = event.cause if event.cause in LOSS_REASONS else "crash"
    since = tally.interrupted[1] if tally.interrupted else event.at
    tally = replace(tally, restart_reason=cause, interrupted=(cause, since))
    size, before = event.micro_batch_size, tally.micro_batch_size
    if size is None or size == before:
        return tally
    why = "leak" if cause == "leak" else "oom"
    shrink = before is None or size < before
    tally = _adapted(tally, "micro_batch", why, shrink=shrink)
    return _at_micro_batch(tally, size)
