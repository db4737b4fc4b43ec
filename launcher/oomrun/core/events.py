"""The events of a run: everything that happened, as frozen values.

Covers: the event types. Does not cover: their JSON form (``event_json.py``), where
they are kept (``oomrun.journal``) and what they add up to (``state.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from oomrun.core.checkpoint_events import (
    CheckpointFailed,
    CheckpointMirrored,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointsFetched,
    MirrorFailed,
    Restored,
)
from oomrun.core.event import DeviceMemory, Event
from oomrun.core.fit_events import FitEnded, FitStarted, OptimizerReplaced

__all__ = [
    "AttemptEnded", "AttemptStarted", "CheckpointFailed", "CheckpointMirrored",
    "CheckpointRejected", "CheckpointSaved", "CheckpointsFetched", "DecisionMade",
    "DeviceMemory", "Event", "FitEnded", "FitStarted", "LeakFound",
    "MicroBatchChanged", "MicroBatchPlanned", "MirrorFailed", "Noted",
    "OomOccurred", "OptimizerReplaced", "PeakRose", "PhaseChanged", "Probed",
    "Progressed", "Restored", "RunEnded", "RunResumed", "RunStarted", "ScriptEnded",
    "SharePlanned", "SizesTried", "SizesWanted", "StateMeasured", "Unknown",
    "WorkerReady",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """First event of a run, or of a new try after one that failed for good.

    ``seed`` seeds whatever the script does not. ``mathematics`` are the settings that
    decide which model comes out; a run is resumed only where they are unchanged.
    """

    type: ClassVar[str] = "run_started"
    run_id: str
    name: str
    version: str
    seed: int
    mathematics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """A new supervisor took an unfinished run over."""

    type: ClassVar[str] = "run_resumed"
    pid: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(Event):
    """All workers of an attempt were started. ``plan`` is ``plan.to_json``'s value."""

    type: ClassVar[str] = "attempt_started"
    attempt: int
    plan: Mapping[str, Any]
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Event):
    """A worker has set its devices up and is about to run the script."""

    type: ClassVar[str] = "worker_ready"
    attempt: int
    rank: int
    pid: int
    tensorflow: str
    keras: str
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Event):
    """Where training is. ``step`` and ``samples`` count over the whole run.

    ``epoch`` counts from 1, as Keras shows it; 0, as is ``fit``, for steps outside of
    any fit. ``step_s`` is the mean duration of the
    ``window_steps`` steps since the last such event. Peaks are of that window.
    """

    type: ClassVar[str] = "progressed"
    attempt: int
    fit: int
    step: int
    samples: int
    epoch: int
    step_in_epoch: int
    loss: float | None
    window_steps: int
    step_s: float
    global_batch_size: int
    micro_batch_size: int
    memory: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged(Event):
    """The worker turned to ``phase``, a job's state; ``memory`` is of that before."""

    type: ClassVar[str] = "phase_changed"
    attempt: int
    phase: str
    memory: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRose(Event):
    """A worker other than the first, which reports for all, needed more than before."""

    type: ClassVar[str] = "peak_rose"
    attempt: int
    rank: int
    memory: tuple[DeviceMemory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OomOccurred(Event):
    """Memory ran out.

    ``kind`` is device or host; ``phase`` build, gradients, apply, evaluate, predict,
    checkpoint or unknown; ``recovery`` what follows: in_process, restart, or none
    where the batch is not ours to cut. Where the text tells, ``operation`` is the
    graph's node that asked, and ``location`` the script's line that made it.
    """

    type: ClassVar[str] = "oom_occurred"
    attempt: int
    rank: int
    device: str
    kind: str
    phase: str
    recovery: str
    micro_batch_size: int | None
    step: int
    message: str
    memory: tuple[DeviceMemory, ...] = ()
    operation: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakFound(Event):
    """Memory in use between steps grows and will not last: the worker starts anew.

    ``grown_bytes`` is how much more is in use than when the fit began, of the
    ``budget_bytes`` that may be. ``steps_left`` is the forecast; 0: it has run out.
    Where ``device`` is "host", what this process holds of the host's memory is meant.
    """

    type: ClassVar[str] = "leak_found"
    attempt: int
    device: str
    step: int
    bytes_per_step: float
    grown_bytes: int
    budget_bytes: int
    steps_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Event):
    """A micro-batch was tried before training, and all that it changed put back.

    ``peak_bytes`` is the highest of its ``steps``; None where memory ran out, which
    ``message`` then says. ``pool_bytes`` is the least pool that has room for one, by
    its allocations; None where these could not be recorded.
    """

    type: ClassVar[str] = "probed"
    attempt: int
    fit: int
    micro_batch_size: int
    steps: int
    peak_bytes: int | None
    seconds: float
    message: str = ""
    pool_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesWanted(Event):
    """A worker other than the first begins a fit, and asks what is known of it."""

    type: ClassVar[str] = "sizes_wanted"
    attempt: int
    rank: int
    profile_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesTried(Event):
    """What a worker of a group, or of several devices, has tried before training.

    Attributes:
        sizes: micro-batches of which three steps were taken.
        peaks: their peaks in bytes; None where memory ran out.
        pools: the least pools that have room for them; None where not recorded.
    """

    type: ClassVar[str] = "sizes_tried"
    attempt: int
    rank: int
    profile_key: str
    sizes: tuple[int, ...]
    peaks: tuple[int | None, ...]
    pools: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMeasured(Event):
    """What a training holds between its steps, in bytes, and what a step adds to it.

    Weights that are trained and those that are not, the optimizer's slots, the rest of
    the model's state (metrics), one batch; ``rest_bytes`` is all that the device has in
    use then, None where it does not count. For ``graph_sizes`` samples the step's graph
    says ``graph_peaks``, and ``graph_activations`` without weights and batch.
    """

    type: ClassVar[str] = "state_measured"
    attempt: int
    fit: int
    global_batch_size: int
    trained_bytes: int
    fixed_bytes: int
    optimizer_bytes: int
    metrics_bytes: int
    input_bytes: int
    rest_bytes: int | None = None
    graph_sizes: tuple[int, ...] = ()
    graph_peaks: tuple[int, ...] = ()
    graph_activations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlanned(Event):
    """The micro-batch that the worker chose to train with, and what it should need."""

    type: ClassVar[str] = "micro_batch_planned"
    attempt: int
    fit: int
    micro_batch_size: int
    global_batch_size: int
    reason: str
    predicted_peak_bytes: int | None = None
    predicted_peak_high_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlanned(Event):
    """What a worker of a group does of each global batch, from now on."""

    type: ClassVar[str] = "share_planned"
    attempt: int
    rank: int
    device: str
    global_batch_size: int
    share: int
    micro_batch_size: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChanged(Event):
    """The micro-batch was changed without a restart."""

    type: ClassVar[str] = "micro_batch_changed"
    attempt: int
    old: int
    new: int
    phase: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Event):
    """Something a person should know once, such as a note on BatchNorm."""

    type: ClassVar[str] = "noted"
    attempt: int
    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded(Event):
    """The script ended, as its own worker reports it: this counts, not the last breath.

    ``outcome`` is finished, raised, exited or stopped (at our own request).
    """

    type: ClassVar[str] = "script_ended"
    attempt: int
    rank: int
    outcome: str
    exit_code: int
    exception: str = ""
    message: str = ""
    location: str = ""
    oom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Event):
    """All workers are gone: ``rank`` failed first, of a ``diagnosis.Cause``."""

    type: ClassVar[str] = "attempt_ended"
    attempt: int
    cause: str
    summary: str
    exit_code: int | None
    signal: int | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade(Event):
    """What follows an attempt: restart, finish, fail or stop, with its one reason.

    ``levers`` are all that are in force from then on, ``left_out`` all devices that it
    goes on without; None: as before.
    """

    type: ClassVar[str] = "decision_made"
    attempt: int
    action: str
    cause: str
    reason: str
    micro_batch_size: int | None = None
    delay_s: float = 0.0
    levers: tuple[str, ...] | None = None
    left_out: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """Last event of a run: ``state`` is completed, failed or preempted."""

    type: ClassVar[str] = "run_ended"
    state: str
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown(Event):
    """An event of a newer version, kept as it was read."""

    type: ClassVar[str] = "unknown"
    original: Mapping[str, Any] = field(default_factory=dict)
