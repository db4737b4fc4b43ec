"""One attempt: its workers listened to and ended, and what was seen of them.

Covers: the loop that waits for all workers, for signals and for deadlines at once; the
end of all where one fails; the evidence of how they ended, which is that of the first
failure. Does not cover: what the evidence means (``core.diagnosis``) and what follows
(``supervisor``).
"""

from __future__ import annotations

import logging
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oomrun.core import event_json, patience
from oomrun.core import events as ev
from oomrun.core.diagnosis import Evidence
from oomrun.core.launch import DUMP_SIGNAL, EXIT_LOST, STOP
from oomrun.core.spec import Auto
from oomrun.core.state import JobState
from oomrun.logs import tail
from oomrun.processes import Ended, Worker, sweep
from oomrun.recorder import Recorder
from oomrun.stops import Stops

__all__ = ["Timing", "watch"]

_log = logging.getLogger(__name__)

_POLL_S = 0.05  # where the kernel cannot tell us of a process's end
_MOST_WARNINGS = 3

# What a worker may tell. Decisions and ends are ours alone.
_FROM_WORKERS = (
    ev.WorkerReady, ev.FitStarted, ev.Progressed, ev.PhaseChanged, ev.OomOccurred,
    ev.LeakFound, ev.Probed, ev.StateMeasured, ev.MicroBatchPlanned,
    ev.MicroBatchChanged, ev.SharePlanned,
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
        others_kill_after_s: the same for workers that end since another has failed;
            they are all that a restart waits for.
        lost_s: for a failure to show whose consequence another worker has reported.
        linger_s: for a process to end after it reported its script's end: threads
            and exit handlers of the script may still be at work.
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
    linger_s: float = 60.0
    hang_after: Auto | float | None = None
    dump_s: float = 1.0
    memory_back_s: float = 30.0
    progress_every_s: float = 2.0


class _Watch:
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

    def _ask(self, worker: Worker, stops: Stops) -> None:
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
        return self.kill_at or self.terminate_at or self._silent_until()


def watch(
    workers: Sequence[Worker],
    attempt: int,
    recorder: Recorder,
    *,
    logs: Sequence[Path],
    stops: Stops,
    timing: Timing,
    descendants: bool,
    oom_kills: Callable[[], int | None],
    answer: Callable[[JobState, ev.Event], Mapping[str, Any] | None],
) -> tuple[int, Evidence]:
    """Waits for the workers' end and says how they ended. Nothing is left of them then.

    Args:
        workers: just started, in the order of their ranks.
        attempt: its number.
        recorder: takes each event as it comes.
        logs: the workers' output.
        stops: requests to stop.
        timing: how long we wait for what.
        descendants: whether all our descendants are the run's, see ``sweep``.
        answer: the message that a worker's event asks for, if any.
        oom_kills: reads how many processes of our cgroup the kernel has killed.

    Returns:
        The rank of the worker that failed first, or 0, and what was seen of its end.

    Raises:
        JournalError: from the recorder; nothing of the workers is left then either.
    """
    group = _Group(workers, attempt, timing)
    kills_before = oom_kills()
    try:
        while not group.all_ended():
            _wait(group, stops, [*group.due(), recorder.due_at()])
            for worker, seen in group.each():
                # All that one that has ended had to say decides how it ended.
                ended = worker.exited()
                for event in _events(seen, worker.drain() if ended else worker.read()):
                    before = recorder.state
                    recorder.record(event)
                    message = answer(before, event)
                    if message is not None:
                        worker.send(message)
            recorder.flush_if_due()
            group.look()
            group.press(stops)
    finally:
        ends = [worker.finish() for worker in workers]
        sweep(recorder.state.run_id, descendants=descendants)
        rest = [worker.drain() for worker in workers]
        for worker in workers:
            worker.close()
    for seen, values in zip(group.seen, rest, strict=True):
        for event in _events(seen, values):
            recorder.record(event)
    kills = (oom_kills() or 0) - (kills_before or 0)
    first = group.first_failure()
    return first, _evidence(group.seen[first], ends[first], logs[first], kills)


class _Group:
    """The workers of an attempt, and which of them has failed first."""

    def __init__(self, workers: Sequence[Worker], attempt: int, timing: Timing) -> None:
        # The first one reports for all: others are silent for as long as all is well.
        silent = replace(timing, hang_after=None)
        self.workers = workers
        self.seen = [
            _Watch(attempt, silent if n else timing, of_group=len(workers) > 1)
            for n in range(len(workers))
        ]
        self._dumped, self._looked_at = False, set[int]()  # of those that have ended
        self._failed: list[int] = []  # before we ended any
        self._hanging: list[int] = []  # of those that another has lost
        self._lost_until: float | None = None
        self._given_up = False

    def each(self) -> Iterator[tuple[Worker, _Watch]]:
        """All of them, in the order of their ranks."""
        return zip(self.workers, self.seen, strict=True)

    def all_ended(self) -> bool:
        """Whether none of them lives."""
        return all(worker.exited() for worker in self.workers)

    def due(self) -> list[float | None]:
        """The monotonic times at which there is something to do."""
        living = [seen for worker, seen in self.each() if not worker.exited()]
        return [self._lost_until, *(seen.due_at() for seen in living)]

    def unseen(self) -> list[Worker]:
        """Those that no look has seen at their end: nothing else may ever wake us."""
        return [w for n, w in enumerate(self.workers) if n not in self._looked_at]

    def press(self, stops: Stops) -> None:
        """Presses each as it has to be; has all write their stacks where one hangs."""
        for worker, seen in self.each():
            if not worker.exited():
                seen.press(worker, stops)
        if self.seen[0].timed_out and not self._dumped:
            self._dump()

    def look(self) -> None:
        """Has all of them end where one has failed."""
        self._looked_at = {n for n, w in enumerate(self.workers) if w.exited()}
        if self._given_up:
            return
        for rank, (worker, seen) in enumerate(self.each()):
            ended = worker.ending()
            if ended is not None and rank not in self._failed and seen.failed(ended):
                self._failed.append(rank)
        if not self._failed:
            return
        now = time.monotonic()
        if self._lost_until is None:
            self._lost_until = now + self.seen[0].timing.lost_s
        if self._causes() or now >= self._lost_until:
            if not self._causes() and not self._dumped:
                self._note_hanging(now)
                return
            self._given_up, self._lost_until = True, None
            for worker, seen in self.each():
                if not worker.exited():
                    seen.give_up()

    def _note_hanging(self, now: float) -> None:
        """One says that another has gone, and that one is there: it hangs."""
        for rank, (worker, seen) in enumerate(self.each()):
            if not worker.exited():
                seen.timed_out = True
                self._hanging.append(rank)
        self._dump()
        self._lost_until = now + self.seen[0].timing.dump_s

    def _dump(self) -> None:
        self._dumped = True
        for worker in self.workers:
            worker.signal_process(DUMP_SIGNAL)

    def first_failure(self) -> int:
        """The rank of the worker that failed by itself; 0 where none has."""
        return next(iter([*self._causes(), *self._hanging, *self._failed]), 0)

    def _causes(self) -> list[int]:
        """Those that have not ended only since another was gone."""
        ends = {rank: self.workers[rank].ending() for rank in self._failed}
        return [
            rank
            for rank, ended in ends.items()
            if ended is not None and ended.exit_code != EXIT_LOST
        ]


def _events(seen: _Watch, values: list[Any]) -> Iterator[ev.Event]:
    for value in values:
        if (event := seen.accept(value)) is not None:
            yield event


def _wait(group: _Group, stops: Stops, times: list[float | None]) -> None:
    """Until a worker says something or ends, a signal comes or it is time."""
    now = time.monotonic()
    waits = [max(0.0, at - now) for at in times if at is not None]
    poll = select.poll()
    poll.register(stops, select.POLLIN)
    for worker in group.workers:
        if worker.channel is not None:
            poll.register(worker.channel, select.POLLIN)
    for worker in group.unseen():
        if worker.exit_fd is None:
            waits.append(_POLL_S)
        else:
            poll.register(worker.exit_fd, select.POLLIN)
    poll.poll(min(waits) * 1000 + 1 if waits else None)
    stops.clear()


def _evidence(seen: _Watch, ended: Ended, log: Path, oom_kills: int) -> Evidence:
    return Evidence(
        exit_code=ended.exit_code,
        signal=ended.signal,
        lost_host=ended.lost_host,
        script=seen.script,
        oom=seen.oom,
        leak=seen.leak,
        stop_requested=seen.asked,
        timed_out=seen.timed_out,
        host_oom_kills=max(0, oom_kills),
        ready=seen.ready,
        log_tail=tail(log),
    )
