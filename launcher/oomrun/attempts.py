"""One attempt: its workers listened to and ended, and what was seen of them.

Covers: the loop that waits for all workers, for signals and for deadlines at once; the
end of all where one fails; the evidence of how they ended, which is that of the first
failure. Does not cover: what the evidence means (``core.diagnosis``) and what follows
(``supervisor``).
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomrun.core import events as ev
from oomrun.core.diagnosis import Evidence
from oomrun.core.launch import DUMP_SIGNAL, EXIT_LOST
from oomrun.core.state import JobState
from oomrun.logs import tail
from oomrun.processes import Ended, sweep
from oomrun.recorder import Recorder
from oomrun.stops import Stops
from oomrun.watched import Timing, Watch, Watched

__all__ = ["watch"]

_log = logging.getLogger(__name__)

_POLL_S = 0.05  # where the kernel cannot tell us of a process's end
_LONGEST_S = 86_400.0  # the kernel takes no wait of more than 24.8 days


def watch(
    workers: Sequence[Watched],
    attempt: int,
    recorder: Recorder,
    *,
    logs: Sequence[Path],
    stops: Stops,
    timing: Timing,
    descendants: bool,
    oom_kills: Callable[[], int | None],
    shm_free: Callable[[], int | None],
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
        shm_free: reads how many bytes /dev/shm has left.

    Returns:
        The rank of the worker that failed first, or 0, and what was seen of its end.

    Raises:
        JournalError: from the recorder; nothing of the workers is left then either.
    """
    group = _Group(workers, attempt, timing)
    kills_before, shm_left = oom_kills(), None
    try:
        while group.unseen():
            _wait(group, stops, [*group.due(), recorder.due_at()])
            heard_out = set()
            for rank, (worker, seen) in enumerate(group.each()):
                # All that one that has ended had to say decides how it ended.
                if ended := worker.exited():
                    heard_out.add(rank)
                for event in _events(seen, worker.drain() if ended else worker.read()):
                    before = recorder.state
                    recorder.record(event)
                    message = answer(before, event)
                    if message is not None:
                        worker.send(message)
            recorder.flush_if_due()
            group.look(heard_out)
            group.press(stops)
        # Before anything is tidied up: what they left there may be gone with them.
        shm_left = shm_free()
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
    kills += sum(worker.oom_kills for worker in workers)
    first = group.first_failure()
    found = _evidence(group.seen[first], ends[first], logs[first], kills)
    return first, replace(found, shm_free_bytes=shm_left)


class _Group:
    """The workers of an attempt, and which of them has failed first."""

    def __init__(
        self, workers: Sequence[Watched], attempt: int, timing: Timing
    ) -> None:
        # The first one reports for all: others are silent for as long as all is well.
        silent = replace(timing, hang_after=None)
        self.workers, self._timing = workers, timing
        self.seen = [
            Watch(attempt, silent if n else timing, of_group=len(workers) > 1)
            for n in range(len(workers))
        ]
        self._dumped, self._looked_at = False, set[int]()  # of those that have ended
        self._failed: list[int] = []  # before we ended any
        self._hanging: list[int] = []  # of those that another has lost
        self._lost_until: float | None = None
        self._given_up = self._first_has_ended = False

    def each(self) -> Iterator[tuple[Watched, Watch]]:
        """All of them, in the order of their ranks."""
        return zip(self.workers, self.seen, strict=True)

    def due(self) -> list[float | None]:
        """The monotonic times at which there is something to do."""
        living = [seen for worker, seen in self.each() if not worker.exited()]
        return [self._lost_until, *(seen.due_at() for seen in living)]

    def unseen(self) -> list[Watched]:
        """Those that no look has seen at their end; there are looks while there are."""
        return [w for n, w in enumerate(self.workers) if n not in self._looked_at]

    def press(self, stops: Stops) -> None:
        """Presses each as it has to be; has all write their stacks where one hangs."""
        for worker, seen in self.each():
            if not worker.exited():
                seen.press(worker, stops)
        if any(seen.timed_out for seen in self.seen) and not self._dumped:
            self._dump()

    def look(self, heard_out: set[int]) -> None:
        """Has all of them end where one has failed.

        Args:
            heard_out: those that had ended before all that they had to say was read.
                One that has ended since may have said that it is done.
        """
        self._looked_at = heard_out
        if 0 in self._looked_at and not self._first_has_ended:
            self._first_has_ended = True
            self._watch_others()
        if self._given_up:
            return
        for rank in sorted(heard_out.difference(self._failed)):
            ended = self.workers[rank].ending()
            if ended is not None and self.seen[rank].failed(ended):
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

    def _watch_others(self) -> None:
        """Nobody reports for them any more; from now on their silence counts."""
        for seen in self.seen[1:]:
            seen.timing, seen.heard_at = self._timing, time.monotonic()

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


def _events(seen: Watch, values: list[Any]) -> Iterator[ev.Event]:
    for value in values:
        if (event := seen.accept(value)) is not None:
            yield event


def _wait(group: _Group, stops: Stops, times: list[float | None]) -> None:
    """Until a worker says something or ends, a signal comes or it is time."""
    now = time.monotonic()
    waits = [_LONGEST_S, *(max(0.0, at - now) for at in times if at is not None)]
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
    poll.poll(min(waits) * 1000 + 1)
    stops.clear()


def _evidence(seen: Watch, ended: Ended, log: Path, oom_kills: int) -> Evidence:
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
        log_tail=tail(log),
        lost=ended.lost,
    )
