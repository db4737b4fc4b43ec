"""The supervisor wakes for a worker's end, whenever that comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from oomrun.attempts import watch
from oomrun.journal import Journal
from oomrun.processes import Worker
from oomrun.recorder import Recorder
from oomrun.stops import Stops
from oomrun.watched import Timing

# Its channel is closed: nothing but its end will ever be heard of it.
SILENT = (
    "import os, time; os.close(int(os.environ['OOMRUN_CHANNEL_FD'])); time.sleep(600)"
)


class Killing(Recorder):
    """Kills a worker at the last moment before the supervisor waits."""

    victim: Worker
    others: list[Worker]

    def due_at(self) -> float | None:
        """Asked for between the last look at the workers and the wait."""
        silent = all(worker.channel is None for worker in [self.victim, *self.others])
        if silent and not self.victim.exited():
            os.kill(self.victim.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.victim.pid, os.WEXITED | os.WNOWAIT)
        return super().due_at()


def test_one_that_ends_between_the_last_look_and_the_wait(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    workers = [
        Worker((sys.executable, "-c", SILENT), os.environ, log, tmp_path)
        for log in logs
    ]
    stops = Stops()
    # So that this test ends where the supervisor sleeps on.
    alarm = threading.Timer(120, stops.request, [signal.SIGINT])
    alarm.start()
    with contextlib.closing(stops), Journal(tmp_path / "journal.jsonl") as journal:
        recorder = Killing(journal, ())
        recorder.victim, recorder.others = workers[1], workers[:1]
        rank, evidence = watch(
            workers,
            1,
            recorder,
            logs=logs,
            stops=stops,
            timing=Timing(lost_s=0.1, others_kill_after_s=0.1),
            descendants=False,
            oom_kills=lambda: None,
            answer=lambda state, event: None,
        )
        slept_on = stops.requested
    alarm.cancel()
    assert not slept_on
    assert (rank, evidence.signal) == (1, signal.SIGKILL)
