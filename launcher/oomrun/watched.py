"""One worker of an attempt, as its supervisor sees it.

Covers: what it may say, what was heard of it so far, when it is told to end and when it
is ended. Does not cover: waiting for it, and for all of a group (``attempts``).
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from oomrun.core import event_json, patience
from oomrun.core import events as ev
from oomrun.core.launch import STOP
from oomrun.core.spec import Auto
from oomrun.core.units import format_duration
from oomrun.processes import Ended
from oomrun.stops import Stops

__all__ = ["Timing", "Watch", "Watched"]

_log = logging.getLogger(__name__)

_MOST_WARNINGS = 3

# What a worker may tell. Decisions and ends are ours alone.
_FROM_WORKERS = (
    ev.WorkerReady, ev.FitStarted, ev.Progressed, ev.PhaseChanged, ev.OomOccurred,
    ev.LeakFound, ev.Probed, ev.StateMeasured, ev.MicroBatchPlanned,
    ev.MicroBatchChanged, ev.SharePlanned, ev.PeakRose, ev.SizesWanted, ev.SizesTried,
    ev.CheckpointSaved, ev.CheckpointFailed, ev.CheckpointRejected, ev.Restored,
    ev.Noted, ev.FitEnded, ev.ScriptEnded, ev.OptimizerReplaced,
    ev.CheckpointMirrored, ev.MirrorFailed,
)  # fmt: skip
# After a script has ended it is said that its process has not.
_SAY_AFTER_S = 5.0
_PHASES = frozenset(
    {"starting", "training", "evaluating", "checkpointing", "adapting", "recovering"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long we wait for what.

    Attributes:
        grace_s: for a worker to write its checkpoint after it was asked to stop.
        kill_after_s: from SIGTERM to SIGKILL.
        others_kill_after_s: the same for workers that end since another has failed;
            they are all that a restart waits for.
        lost_s: for a failure to show whose consequence another worker has reported.
        linger_s: for a process to end after it reported that its script finished:
            threads and exit handlers may still be at work, sending away what was
            trained, say.
        failed_linger_s: the same after a script that did not, which is to go on.
        hang_after: without any event before a worker counts as hanging, as
            ``patience`` reads it.
        dump_s: for the workers to write their stacks, where one hangs.
        memory_back_s: for a GPU's memory to come back after its process died.
        progress_every_s: between two journal entries of mere progress.
    """

    grace_s: float = 30.0
    kill_after_s: float = 5.0
    others_kill_after_s: float = 1.0
    lost_s: float = 0.5
    linger_s: float = 1800.0
    failed_linger_s: float = 60.0
    hang_after: Auto | float | None = None
    dump_s: float = 1.0
    memory_back_s: float = 30.0
    progress_every_s: float = 2.0


class Watched(Protocol):
    """A worker, on this machine (``processes.Worker``) or another."""

    @property
    def pid(self) -> int: ...
    @property
    def channel(self) -> socket.socket | None: ...
    @property
    def exit_fd(self) -> int | None: ...
    @property
    def oom_kills(self) -> int: ...
    def read(self) -> list[Any]: ...
    def drain(self) -> list[Any]: ...
    def send(self, message: Mapping[str, Any]) -> bool: ...
    def exited(self) -> bool: ...
    def ending(self) -> Ended | None: ...
    def signal_process(self, number: int) -> None: ...
    def signal_group(self, number: int) -> None: ...
    def finish(self) -> Ended: ...
    def close(self) -> None: ...


class Watch:
    """What was seen of one worker so far, and when it is pressed to end."""

    def __init__(self, attempt: int, timing: Timing, *, of_group: bool) -> None:
        self.attempt = attempt
        self.timing = timing
        self._of_group = of_group
        self._longest_s: float | None = None  # silence in training
        self._phase = ""
        self.kill_after_s = timing.kill_after_s
        self.ready = False
        self.script: ev.ScriptEnded | None = None
        self.oom: ev.OomOccurred | None = None
        self.leak: ev.LeakFound | None = None
        self.asked = False
        self.timed_out = False
        self.heard_at = time.monotonic()
        self.terminate_at: float | None = None
        self.kill_at: float | None = None
        self._say_at: float | None = None
        self._refused = 0

    def accept(self, value: Any) -> ev.Event | None:
        """The event in a message, or None where it is none that a worker may send."""
        try:
            event = event_json.from_json(value)
        except event_json.MalformedEventError as error:
            self._refuse(str(error))
            return None
        if not isinstance(event, _FROM_WORKERS):
            self._refuse(f"{event.type} is not for a worker to say")
        elif isinstance(event, ev.PhaseChanged) and event.phase not in _PHASES:
            self._refuse(f"unknown phase {event.phase!r}")
        elif event.attempt != self.attempt:
            self._refuse(f"attempt {event.attempt} is not {self.attempt}")
        else:
            self._listen(event, time.monotonic())
            self._learn(event)
            return event
        return None

    def _listen(self, event: ev.Event, now: float) -> None:
        """Keeps how long it was silent, from its first step on."""
        if self._longest_s is not None:
            self._longest_s = max(self._longest_s, now - self.heard_at)
        elif isinstance(event, ev.Progressed):
            self._longest_s = 0.0
        if isinstance(event, ev.PhaseChanged):
            self._phase = event.phase
        self.heard_at = now

    def _silent_until(self) -> float | None:
        """The monotonic time from which on it counts as hanging; None: never."""
        learnt = None if self._phase == "evaluating" else self._longest_s
        silence_s = patience.silence_s(
            self.timing.hang_after, of_group=self._of_group, longest_s=learnt
        )
        return None if silence_s is None else self.heard_at + silence_s

    def _learn(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerReady():
                self.ready = True
            case ev.OomOccurred():
                self.oom = event
            case ev.LeakFound():
                self.leak = event
            case ev.ScriptEnded():
                # The first word counts: nothing may take back that it was stopped.
                self.script = self.script or event
                finished = self.script.outcome in ("finished", "exited")
                timing = self.timing
                self._terminate_within(
                    timing.linger_s if finished else timing.failed_linger_s
                )
                self._say_at = time.monotonic() + _SAY_AFTER_S

    def _refuse(self, why: str) -> None:
        self._refused += 1
        if self._refused <= _MOST_WARNINGS:
            _log.warning("a message of the worker is left out: %s", why[:200])

    def press(self, worker: Watched, stops: Stops) -> None:
        """Asks the worker to end, then tells it, then ends it, as time goes by."""
        now = time.monotonic()
        if self._say_at is not None and now >= self._say_at:
            self._say_at = None
            left_s = max(0, round((self.terminate_at or now) - now))
            _log.warning(
                "the script has ended, and its threads or exit handlers are still at "
                "work: they have %s more",
                format_duration(left_s),
            )
        if stops.requested and not self.asked:
            self._ask(worker, stops)
        silent_until = self._silent_until()
        if self.terminate_at is None and silent_until is not None:
            self.timed_out = now >= silent_until
            if self.timed_out:
                self._terminate_within(self.timing.dump_s)
        if stops.urgent:
            worker.signal_group(signal.SIGKILL)
        elif self.kill_at is not None and now >= self.kill_at:
            worker.signal_group(signal.SIGKILL)
            self.kill_at = now + self.kill_after_s
        elif self.kill_at is None and (
            self.terminate_at is not None and now >= self.terminate_at
        ):
            worker.signal_group(signal.SIGTERM)
            self.kill_at = now + self.kill_after_s

    def _ask(self, worker: Watched, stops: Stops) -> None:
        self.asked = True
        grace_s = self.timing.grace_s
        message = {"do": STOP, "reason": stops.reason, "grace_s": grace_s}
        heard = worker.send(message)
        # Before the script runs there is nothing to save, and nobody who listens.
        self._terminate_within(grace_s if heard and self.ready else 0.0)

    def give_up(self) -> None:
        """Another worker has failed: this one cannot go on."""
        self.kill_after_s = self.timing.others_kill_after_s
        self._terminate_within(0.0)

    def failed(self, ended: Ended) -> bool:
        """Whether a worker that has ended so has not done its part."""
        if self.script is None:
            return True
        return self.script.outcome not in ("finished", "stopped") and (
            ended.exit_code != 0
        )

    def _terminate_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.terminate_at = min(at, self.terminate_at or at)

    def due_at(self) -> float | None:
        """The monotonic time before which ``press`` has nothing to do."""
        due_at = self.kill_at or self.terminate_at or self._silent_until()
        return self._say_at if due_at is None else min(due_at, self._say_at or due_at)
