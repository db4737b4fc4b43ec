"""The metrics of a run as a whole.

Covers: state, progress, counts of what went wrong, checkpoints, workers. Does not
cover: the memory of its devices (``device_families.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oomrun.core.state import RESTART_CAUSES, JobState
from oomrun.core.status import shows_steps
from oomrun.metrics.device_families import devices_of
from oomrun.metrics.family import Counted, Family, Sample, Value

__all__ = ["RUN_FAMILIES", "RUN_STATES"]

RUN_STATES = (
    "pending", "starting", "training", "evaluating", "checkpointing", "adapting",
    "recovering", "completed", "failed", "preempted",
)  # fmt: skip


def _one(
    read: Callable[[JobState], Value | None],
) -> Callable[[JobState], Iterable[Sample]]:
    """A reader for a metric with one sample a run."""
    return lambda state: [((), read(state))]


def _of_steps(
    read: Callable[[JobState], Value | None],
) -> Callable[[JobState], Iterable[Sample]]:
    """The same for what a run of a command never tells: no sample, instead of 0."""
    return lambda state: [((), read(state) if shows_steps(state) else None)]


def _run_info(state: JobState) -> Iterable[Sample]:
    strategy = str((state.plan or {}).get("strategy", ""))
    versions = state.versions
    yield (
        (
            state.run_id,
            strategy,
            versions.get("tensorflow", ""),
            versions.get("keras", ""),
        ),
        1.0,
    )


def _run_end(state: JobState) -> Iterable[Sample]:
    if state.terminal:
        yield (state.state,), state.ended_at


def _accumulation_steps(state: JobState) -> float | None:
    steps = [d.accumulation_steps for d in devices_of(state) if d.accumulation_steps]
    return max(steps, default=None)


def _micro_batch_size(state: JobState) -> float | None:
    if shows_steps(state):
        return state.micro_batch_size
    # Nobody reports a command's: it is what the command was told.
    return next((device.micro_batch_size for device in devices_of(state)), None)


def _lost_steps(state: JobState) -> Iterable[Sample]:
    if shows_steps(state):
        yield from (((why,), n) for why, n in state.tally.lost_steps.items())


def _replicas(state: JobState) -> float | None:
    return len(devices_of(state)) or None


def _workers_expected(state: JobState) -> float:
    # One worker a run until strategies with several come; none once it has ended.
    return 0 if state.terminal or state.attempt == 0 else max(1, len(state.pids))


def _workers_alive(state: JobState) -> float:
    return len(state.pids) if state.attempt_open else 0


RUN_FAMILIES: tuple[Family[JobState], ...] = (
    Family(
        "oomrun_run_info", "info", "What the run is.", _run_info,
        ("run_id", "strategy", "framework_version", "keras_version"),
        lambda s: (s.plan, s.versions),
    ),
    Family(
        "oomrun_run_state", "stateset", "The state that the run is in: 1, others 0.",
        _one(lambda s: {name: name == s.state for name in RUN_STATES}),
        source=lambda s: (s.state,),
    ),
    Family(
        "oomrun_run_start_timestamp_seconds", "gauge",
        "When the run was first started, in seconds since 1970.",
        _one(lambda s: s.started_at),
    ),
    Family(
        "oomrun_run_end_timestamp_seconds", "gauge",
        "When the run ended, in seconds since 1970; absent while it goes on.",
        _run_end, ("status",),
    ),
    Family(
        "oomrun_restarts_total", "counter",
        "Attempts after the first, by what made them necessary.",
        lambda s: [
            ((c,), Counted(s.restarts.get(c, 0), s.traces.get(c)))
            for c in RESTART_CAUSES
        ],
        ("reason",), lambda s: (s.restarts, s.traces),
    ),
    Family(
        "oomrun_resumes_total", "counter",
        "How often a new supervisor took the unfinished run over.",
        _one(lambda s: s.tally.resumes),
    ),
    Family(
        "oomrun_adaptations_total", "counter", "Changes of settings during the run.",
        lambda s: s.tally.adaptations.items(), ("action", "direction", "trigger"),
        lambda s: (s.tally.adaptations,),
    ),
    Family(
        "oomrun_lost_steps_total", "counter",
        "Steps that had to be trained again, by what made the restart necessary.",
        _lost_steps, ("reason",),
    ),
    Family(
        "oomrun_recovery_duration_seconds", "histogram",
        "Time from what stopped training to the first progress reported after it.",
        lambda s: [((why,), h) for why, h in s.tally.recovery_times.items()],
        ("reason",), lambda s: (s.tally.recovery_times,),
    ),
    Family(
        "oomrun_steps_total", "counter",
        "Optimizer steps trained, those trained again after a restart included.",
        _of_steps(lambda s: s.tally.steps),
    ),
    Family(
        "oomrun_samples_total", "counter",
        "Samples trained on, those trained on again after a restart included.",
        _of_steps(lambda s: s.tally.samples),
    ),
    Family(
        "oomrun_step_duration_seconds", "histogram",
        "Duration of optimizer steps; each counts with its report's mean.",
        _of_steps(lambda s: s.tally.step_times),
    ),
    Family(
        "oomrun_step", "gauge",
        "Optimizer steps that the run has behind it; falls when steps are lost.",
        _of_steps(lambda s: s.step),
    ),
    Family(
        "oomrun_epoch", "gauge", "The current epoch, from 1.",
        _of_steps(lambda s: s.epoch),
    ),
    Family(
        "oomrun_epochs", "gauge", "Epochs that the current fit was asked for.",
        _one(lambda s: s.epochs),
    ),
    Family("oomrun_loss", "gauge", "The last training loss.", _one(lambda s: s.loss)),
    Family(
        "oomrun_global_batch_size", "gauge",
        "Samples per optimizer step over all replicas; recovery never changes it.",
        _one(lambda s: s.global_batch_size),
    ),
    Family(
        "oomrun_micro_batch_size", "gauge",
        "Samples in one forward and backward pass on one replica.",
        _one(_micro_batch_size),
    ),
    Family(
        "oomrun_gradient_accumulation_steps", "gauge",
        "Micro-batches per optimizer step, the most of any replica.",
        _one(_accumulation_steps),
    ),
    Family("oomrun_replicas", "gauge", "Copies of the model.", _one(_replicas)),
    Family(
        "oomrun_workers_expected", "gauge", "Worker processes that should be there.",
        _one(_workers_expected),
    ),
    Family(
        "oomrun_workers_alive", "gauge", "Worker processes that are there.",
        _one(_workers_alive),
    ),
    Family(
        "oomrun_worker_last_heartbeat_timestamp_seconds", "gauge",
        "When a worker last reported anything, in seconds since 1970.",
        lambda s: [((str(rank),), at) for rank, at in s.tally.heartbeats.items()],
        ("rank",),
    ),
    Family(
        "oomrun_checkpoint_last_success_timestamp_seconds", "gauge",
        "When the newest complete checkpoint was written, in seconds since 1970.",
        _one(lambda s: s.checkpoint.at if s.checkpoint else None),
    ),
    Family(
        "oomrun_checkpoint_size_bytes", "gauge",
        "Size of the newest complete checkpoint.",
        _one(lambda s: s.checkpoint.size_bytes if s.checkpoint else None),
    ),
    Family(
        "oomrun_checkpoint_duration_seconds", "histogram",
        "Time to write a checkpoint.", _one(lambda s: s.tally.checkpoint_times),
        source=lambda s: (s.tally.checkpoint_times,),
    ),
    Family(
        "oomrun_checkpoint_failures_total", "counter",
        "Checkpoints that could not be written.", _one(lambda s: s.checkpoint_failures),
    ),
    Family(
        "oomrun_checkpoint_mirror_last_success_timestamp_seconds", "gauge",
        "When the newest checkpoint was complete at the URL, in seconds since 1970.",
        _one(lambda s: s.mirrored.at if s.mirrored else None),
    ),
    Family(
        "oomrun_checkpoint_mirror_failures_total", "counter",
        "Checkpoints that could not be copied to the URL, or read from there.",
        _one(lambda s: s.mirror_failures),
    ),
)  # fmt: skip
