"""One attempt: a worker started, listened to and ended, and what was seen of it.

Covers: the loop that waits for the worker, for signals and for deadlines at once, and
the evidence of how it ended. Does not cover: what the evidence means
(``core.diagnosis``) and what follows (``supervisor``).
"""

from __future__ import annotations

import filecmp
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.diagnosis import Evidence
from oomrun.core.launch import STOP
from oomrun.core.state import JobState
from oomrun.processes import Ended, Worker, sweep
from oomrun.recorder import Recorder
from oomrun.stops import Stops

__all__ = ["Timing", "of_command", "watch"]

_log = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 64 * 1024
_POLL_S = 0.05  # where the kernel cannot tell us of a process's end
_MOST_WARNINGS = 3

# What a worker may tell. Decisions and ends are ours alone.
_FROM_WORKERS = (
    ev.WorkerReady, ev.FitStarted, ev.Progressed, ev.PhaseChanged, ev.OomOccurred,
    ev.LeakFound, ev.Probed, ev.StateMeasured, ev.MicroBatchPlanned,
    ev.MicroBatchChanged,
    ev.CheckpointSaved, ev.CheckpointFailed, ev.CheckpointRejected, ev.Restored,
    ev.Noted, ev.FitEnded, ev.ScriptEnded,
)  # fmt: skip
_PHASES = frozenset(
    {"starting", "training", "evaluating", "checkpointing", "adapting", "recovering"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long we wait for what.

    Attributes:
        grace_s: for a worker to write its checkpoint after it was asked to stop.
        kill_after_s: from SIGTERM to SIGKILL.
        linger_s: for a process to end after it reported its script's end: threads
            and exit handlers of the script may still be at work.
        silence_s: without any event before a worker counts as hanging; None: never,
            since one step may take as long as it takes.
        memory_back_s: for a GPU's memory to come back after its process died.
        progress_every_s: between two journal entries of mere progress.
    """

    grace_s: float = 30.0
    kill_after_s: float = 5.0
    linger_s: float = 60.0
    silence_s: float | None = None
    memory_back_s: float = 30.0
    progress_every_s: float = 2.0


class _Watch:
    """What was seen of one worker so far, and when it is pressed to end."""

    def __init__(self, attempt: int, timing: Timing) -> None:
        self.attempt = attempt
        self.timing = timing
        self.ready = False
        self.script: ev.ScriptEnded | None = None
        self.oom: ev.OomOccurred | None = None
        self.leak: ev.LeakFound | None = None
        self.asked = False
        self.timed_out = False
        self.heard_at = time.monotonic()
        self.terminate_at: float | None = None
        self.kill_at: float | None = None
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
            self.heard_at = time.monotonic()
            self._learn(event)
            return event
        return None

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
                self._terminate_within(self.timing.linger_s)

    def _refuse(self, why: str) -> None:
        self._refused += 1
        if self._refused <= _MOST_WARNINGS:
            _log.warning("a message of the worker is left out: %s", why[:200])

    def press(self, worker: Worker, stops: Stops) -> None:
        """Asks the worker to end, then tells it, then ends it, as time goes by."""
        now = time.monotonic()
        if stops.requested and not self.asked:
            self._ask(worker, stops)
        silence_s = self.timing.silence_s
        if self.terminate_at is None and silence_s is not None:
            self.timed_out = now >= self.heard_at + silence_s
            if self.timed_out:
                self._terminate_within(0.0)
        if stops.urgent:
            worker.signal_group(signal.SIGKILL)
        elif self.kill_at is not None and now >= self.kill_at:
            worker.signal_group(signal.SIGKILL)
            self.kill_at = now + self.timing.kill_after_s
        elif self.kill_at is None and (
            self.terminate_at is not None and now >= self.terminate_at
        ):
            worker.signal_group(signal.SIGTERM)
            self.kill_at = now + self.timing.kill_after_s

    def _ask(self, worker: Worker, stops: Stops) -> None:
        self.asked = True
        grace_s = self.timing.grace_s
        message = {"do": STOP, "reason": stops.reason, "grace_s": grace_s}
        heard = worker.send(message)
        # Before the script runs there is nothing to save, and nobody who listens.
        self._terminate_within(grace_s if heard and self.ready else 0.0)

    def _terminate_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self.terminate_at = min(at, self.terminate_at or at)

    def due_at(self) -> float | None:
        """The monotonic time before which ``press`` has nothing to do."""
        at = self.kill_at or self.terminate_at
        if at is None and self.timing.silence_s is not None:
            return self.heard_at + self.timing.silence_s
        return at


def watch(
    worker: Worker,
    attempt: int,
    recorder: Recorder,
    *,
    log: Path,
    stops: Stops,
    timing: Timing,
    descendants: bool,
    oom_kills: Callable[[], int | None],
    answer: Callable[[JobState, ev.Event], Mapping[str, Any] | None],
) -> Evidence:
    """Waits for the worker's end and says how it ended. Nothing of it is left then.

    Args:
        worker: just started.
        attempt: its number.
        recorder: takes each event as it comes.
        log: the worker's output.
        stops: requests to stop.
        timing: how long we wait for what.
        descendants: whether all our descendants are the run's, see ``sweep``.
        answer: the message that a worker's event asks for, if any.
        oom_kills: reads how many processes of our cgroup the kernel has killed.

    Raises:
        JournalError: from the recorder; nothing of the worker is left then either.
    """
    seen = _Watch(attempt, timing)
    kills_before = oom_kills()
    try:
        while not worker.exited():
            _wait(worker, stops, [seen.due_at(), recorder.due_at()])
            for event in _events(seen, worker.read()):
                before = recorder.state
                recorder.record(event)
                message = answer(before, event)
                if message is not None:
                    worker.send(message)
            recorder.flush_if_due()
            seen.press(worker, stops)
    finally:
        ended = worker.finish()
        sweep(recorder.state.run_id, descendants=descendants)
        rest = worker.drain()
        worker.close()
    for event in _events(seen, rest):
        recorder.record(event)
    kills_after = oom_kills()
    return _evidence(seen, ended, log, (kills_after or 0) - (kills_before or 0))


def _events(seen: _Watch, values: list[Any]) -> Iterator[ev.Event]:
    for value in values:
        if (event := seen.accept(value)) is not None:
            yield event


def _wait(worker: Worker, stops: Stops, times: list[float | None]) -> None:
    """Until the worker says something or ends, a signal comes or it is time."""
    now = time.monotonic()
    waits = [max(0.0, at - now) for at in times if at is not None]
    poll = select.poll()
    poll.register(stops, select.POLLIN)
    if worker.channel is not None:
        poll.register(worker.channel, select.POLLIN)
    if worker.exit_fd is not None:
        poll.register(worker.exit_fd, select.POLLIN)
    else:
        waits.append(_POLL_S)
    poll.poll(min(waits) * 1000 + 1 if waits else None)
    stops.clear()


def _evidence(seen: _Watch, ended: Ended, log: Path, oom_kills: int) -> Evidence:
    return Evidence(
        exit_code=ended.exit_code,
        signal=ended.signal,
        script=seen.script,
        oom=seen.oom,
        leak=seen.leak,
        stop_requested=seen.asked,
        timed_out=seen.timed_out,
        host_oom_kills=max(0, oom_kills),
        ready=seen.ready,
        log_tail=_tail(log),
    )


def of_command(evidence: Evidence, device: str, log: Path, before: Path) -> Evidence:
    """The evidence of an attempt of a command, whose exit is all it reports.

    Args:
        evidence: what was seen of its end.
        device: what it was given.
        log: its output.
        before: the output of the attempt before; it may not be there.
    """
    return replace(
        evidence, command=True, device=device, repeated=_same_output(log, before)
    )


def _same_output(log: Path, before: Path) -> bool:
    """Whether both said the same; programs that say nothing may have done anything."""
    try:
        return os.path.getsize(log) > 0 and filecmp.cmp(log, before, shallow=False)
    except OSError:
        return False


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return file.read(_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
