"""What the supervisor hands to a worker, and what the two say to each other.

Covers: ``Launch`` (written to the attempt's ``launch.json`` before the worker starts),
the names of the environment variables that carry it, and the messages from supervisor
to worker. Worker to supervisor go events (``events.py``), one JSON object a line, over
the same socket. Its closing means that the other side is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from oomrun.core import plan as plans

__all__ = [
    "ADDRESS",
    "CHANNEL_FD",
    "DUMP_SIGNAL",
    "EXIT_LOST",
    "LAUNCH_FILE",
    "MEETING",
    "RANK",
    "REMEMBERED",
    "RUN_TOKEN",
    "SIZE",
    "STOP",
    "Launch",
    "from_json",
    "to_json",
]

#: Environment variable: path of the attempt's ``launch.json``.
LAUNCH_FILE = "OOMRUN_LAUNCH_FILE"
#: Environment variable: number of the inherited socket to the supervisor.
CHANNEL_FD = "OOMRUN_CHANNEL_FD"
#: Environment variable: the run's id, by which leftover processes are recognised.
RUN_TOKEN = "OOMRUN_RUN_ID"

#: The signal at which a worker writes the stacks of its threads to its log: one of the
#: real-time signals, which scripts and cluster managers leave alone.
DUMP_SIGNAL = 50

#: A worker's exit code: another worker of the attempt has gone.
EXIT_LOST = 71

#: Environment variable, for the script: which of the attempt's workers it is in.
RANK = "OOMRUN_RANK"
#: Environment variable: how many workers the attempt has, where it has a meeting.
SIZE = "OOMRUN_SIZE"
#: Environment variable: ``address:port`` of the server that the workers meet at.
MEETING = "OOMRUN_MEETING"
#: Environment variable: the address by which the other workers reach this one's host.
ADDRESS = "OOMRUN_ADDRESS"

#: Message to the worker: write a checkpoint at the next step's end, then exit.
STOP = "stop"
#: Message to the worker, after each ``FitStarted`` with a ``profile_key``: what earlier
#: runs have measured of that model (``measured`` and ``recorded``: pairs of size and
#: bytes; ``failed``).
REMEMBERED = "remembered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything a worker needs to know.

    Attributes:
        rank: which of the attempt's workers this one is, from 0.
        plan: this worker's device, its limit, its micro-batch.
        program_kind: script, module or command.
        program: the script's absolute path, the module's dotted name, or a command's
            first word.
        args: its arguments; a command's are filled in.
        run_id: the run that checkpoints must be of.
        seed: seeds what the script does not seed itself.
        checkpoint_dir: absolute path.
        checkpoint_every_steps, checkpoint_every_s: at most one is set.
        keep: how many checkpoints are kept.
        checkpoint_timeout_s: how long one may take.
        checkpoint_url: where they are copied to; None: nowhere.
        job: what tells the job from others, see ``remote.digests``.
        in_process: whether the worker may shrink the micro-batch by itself.
        micro_batch_max: the user's own upper bound, None without one.
        micro_batch_fixed: the user's own micro-batch, never changed.
        batch_norm: micro_batch, freeze or refuse.
        grow_back: whether a micro-batch comes back once its memory is free again.
        shares: auto or by_memory.
        probe: whether micro-batches may be tried before the first step.
        measure: leave before the first step, once the memory it needs is known.
        environment: what the device and the settings add to a model's key
            (``profile.Environment``); None where nothing is remembered.
        fit, profile_key: the fit that earlier attempts came to, and its model.
        measured: peak bytes by micro-batch size of that model.
        recorded: the least pool that has room for a step, likewise.
        micro_batch_failed: the smallest that ran out of memory then.
        last_step: where training stood at the last attempt's end (for what was lost).
        supervisor_pid: who must be our parent; None in a test without a supervisor.
    """

    attempt: int
    rank: int
    plan: plans.Plan
    program_kind: str
    program: str
    args: tuple[str, ...]
    run_id: str
    seed: int
    checkpoint_dir: str
    checkpoint_every_steps: int | None
    checkpoint_every_s: float | None
    keep: int
    in_process: bool
    micro_batch_max: int | None
    micro_batch_fixed: int | None
    global_batch_size: int | None
    last_step: int
    batch_norm: str = "micro_batch"
    grow_back: bool = True
    shares: str = "auto"
    probe: bool = False
    measure: bool = False
    measured: Mapping[int, int] = field(default_factory=dict)
    recorded: Mapping[int, int] = field(default_factory=dict)
    micro_batch_failed: int | None = None
    environment: Mapping[str, Any] | None = None
    fit: int = 0
    profile_key: str | None = None
    checkpoint_timeout_s: float = 600.0
    checkpoint_url: str | None = None
    job: Mapping[str, str] = field(default_factory=dict)
    supervisor_pid: int | None = None


def to_json(launch: Launch) -> dict[str, Any]:
    """The launch as a JSON object."""
    return {**asdict(launch), "plan": plans.to_json(launch.plan)}


def from_json(value: Mapping[str, Any]) -> Launch:
    """Reads a launch back."""
    return Launch(
        **{
            **value,
            "plan": plans.from_json(value["plan"]),
            "args": tuple(value["args"]),
            # JSON has no numbers for keys.
            **{
                name: {int(k): v for k, v in value.get(name, {}).items()}
                for name in ("measured", "recorded")
            },
        }
    )
