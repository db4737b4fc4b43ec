"""The supervisor wakes for a worker's end, and sees it, whenever that comes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from oomrun.attempts import watch
from oomrun.core.diagnosis import Evidence
from oomrun.core.events import ScriptEnded
from oomrun.journal import Journal, read
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


# Something to read wakes the supervisor.
WAKES = """
import os
os.write(int(os.environ["OOMRUN_CHANNEL_FD"]), b"{}\\n")
"""
# Says that it is done, once it may, and some time after the other.
DONE = """
import json, os, pathlib, socket, sys, time
channel = socket.socket(fileno=int(os.environ["OOMRUN_CHANNEL_FD"]))
while not pathlib.Path("go").exists():
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))
rank = int(sys.argv[2])
body = {"v": 1, "type": "script_ended", "at": time.time(), "attempt": 1, "rank": rank,
        "outcome": "finished", "exit_code": 0}
channel.sendall(json.dumps(body).encode() + b"\\n")
"""


def watched(
    tmp_path: Path,
    programs: list[list[str]],
    recorder_of: Callable[[Journal, list[Worker]], Recorder],
    stops: Stops,
) -> tuple[int, Evidence]:
    """What ``watch`` says of these workers' ends."""
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(len(programs))]
    workers = [
        Worker((sys.executable, "-c", *program), os.environ, log, tmp_path)
        for program, log in zip(programs, logs, strict=True)
    ]
    # So that this test ends where the supervisor sleeps on.
    alarm = threading.Timer(120, stops.request, [signal.SIGINT])
    alarm.start()
    with contextlib.closing(stops), Journal(tmp_path / "journal.jsonl") as journal:
        found = watch(
            workers,
            1,
            recorder_of(journal, workers),
            logs=logs,
            stops=stops,
            timing=Timing(lost_s=0.1, others_kill_after_s=0.1),
            descendants=False,
            oom_kills=lambda: None,
            shm_free=lambda: None,
            answer=lambda state, event: None,
        )
        slept_on = stops.requested
    alarm.cancel()
    assert not slept_on
    return found


def test_one_that_ends_between_the_last_look_and_the_wait(tmp_path: Path) -> None:
    def recorder_of(journal: Journal, workers: list[Worker]) -> Recorder:
        recorder = Killing(journal, ())
        recorder.victim, recorder.others = workers[1], workers[:1]
        return recorder

    rank, evidence = watched(tmp_path, [[SILENT], [SILENT]], recorder_of, Stops())
    assert (rank, evidence.signal) == (1, signal.SIGKILL)


class KillingAfterALook(Stops):
    """Kills the last worker after the look at all of them, where it is the last one."""

    workers: list[Worker]

    @property
    def requested(self) -> bool:
        """Asked for after each look."""
        *others, victim = self.workers
        if all(worker.exited() for worker in others) and not victim.exited():
            os.kill(victim.pid, signal.SIGKILL)
            os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        return super().requested


def test_one_that_ends_after_the_last_look(tmp_path: Path) -> None:
    """The run was said to be finished, as its first worker was."""
    stops = KillingAfterALook()

    def recorder_of(journal: Journal, workers: list[Worker]) -> Recorder:
        stops.workers = workers
        return Recorder(journal, ())

    (tmp_path / "go").touch()
    programs = [[DONE, "0", "0"], [SILENT]]
    rank, evidence = watched(tmp_path, programs, recorder_of, stops)
    assert (rank, evidence.signal) == (1, signal.SIGKILL)


class EndingBeforeALook(Recorder):
    """Has the first worker say that it is done, and end, after all was read."""

    first: Worker
    go: Path

    def flush_if_due(self) -> None:
        """Called between reading and looking."""
        if not self.go.exists():
            self.go.touch()
            os.waitid(os.P_PID, self.first.pid, os.WEXITED | os.WNOWAIT)
        super().flush_if_due()


def test_one_that_is_done_between_reading_and_looking(tmp_path: Path) -> None:
    """It counted as failed, and the others were ended."""

    def recorder_of(journal: Journal, workers: list[Worker]) -> Recorder:
        recorder = EndingBeforeALook(journal, ())
        recorder.first, recorder.go = workers[0], tmp_path / "go"
        return recorder

    programs = [[DONE, "0", "0"], [WAKES + DONE, "1.0", "1"]]
    rank, evidence = watched(tmp_path, programs, recorder_of, Stops())
    assert rank == 0
    assert evidence.script is not None
    assert evidence.script.outcome == "finished"
    ends = [e for e in read(tmp_path / "journal.jsonl") if isinstance(e, ScriptEnded)]
    assert sorted(e.rank for e in ends) == [0, 1]


def test_who_is_killed_with_all_others_is_said_to_be_killed() -> None:
    """By an agent whose caller is gone; its other thread waits for the worker."""
    code = """
import subprocess, sys
from oomrun.processes import kill_descendants
child = subprocess.Popen(["sleep", "600"])
kill_descendants()
print(child.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{-signal.SIGKILL}\n", done.stderr
