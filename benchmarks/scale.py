"""What many devices cost: the shares of one global batch, a death among many workers.

The second by the real supervisor with 256 workers without TensorFlow: one of them is
killed (SIGKILL); what is measured is the time until the supervisor has it in its hands
that one has failed, and until no process of the run is left. Prints JSON.

python -m benchmarks.scale
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from oomrun.core import events as ev
from oomrun.core.jobfile import load
from oomrun.core.launch import RUN_TOKEN
from oomrun.core.shares import Replica, Speed, share_out
from oomrun.core.state import JobState
from oomrun.launching import Job
from oomrun.rundir import RunDir
from oomrun.stops import Stops
from oomrun.supervisor import supervise

DEVICES = 10_000
BATCH = 1_000_000
REPEATS = 5
WORKERS, DEATHS = 256, 5
JOB = """\
name: many
script: train.py
strategy: horovod
devices: {{cpu: {workers}}}
recovery: {{max_restarts: {{crash: 0}}}}
metrics: {{listen: "127.0.0.1:0"}}
"""


def replicas(kinds: int) -> list[Replica]:
    """So many devices of each of ``kinds`` kinds, in no order, none like another."""
    chance = random.Random(5)
    made = [
        Replica(
            chance.randint(1, 512),
            Speed(pass_s=chance.uniform(0, 0.2), sample_s=chance.uniform(1e-4, 1e-2)),
        )
        for _ in range(kinds)
    ]
    found = (made * -(-DEVICES // kinds))[:DEVICES]
    chance.shuffle(found)
    return found


def measured(devices: list[Replica]) -> dict[str, float]:
    """Of some plans the one that took longest; CPU time is ours alone."""
    wall, cpu = [], []
    for _ in range(REPEATS):
        began, began_cpu = time.perf_counter(), time.process_time()
        shares = share_out(BATCH, devices)
        cpu.append(time.process_time() - began_cpu)
        wall.append(time.perf_counter() - began)
        assert sum(part.share for part in shares.parts) == BATCH
    return {"wall_s": max(wall), "cpu_s": max(cpu)}


class Killer:
    """Kills one worker once all are ready, and sees when another one ends for it."""

    def __init__(self) -> None:
        self.started_s = self.noticed_s = 0.0
        self.killed_at = 0.0
        self._began = time.perf_counter()
        self._pids: list[int] = []
        self._thread = threading.Thread(target=self._kill)

    def __call__(self, state: JobState, event: ev.Event) -> None:
        """An observer of the run."""
        if isinstance(event, ev.WorkerReady):
            self._pids.append(event.pid)
            if len(self._pids) == WORKERS:
                self.started_s = time.perf_counter() - self._began
                self._thread.start()

    def _kill(self) -> None:
        victim = random.Random(self._pids[0]).choice(self._pids)
        poll = select.poll()
        others = [os.pidfd_open(pid) for pid in self._pids if pid != victim]
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        self.killed_at = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        poll.poll()
        self.noticed_s = time.perf_counter() - self.killed_at
        for descriptor in others:
            os.close(descriptor)

    def join(self) -> None:
        """Waits for what it measures."""
        self._thread.join()


def death(folder: Path) -> dict[str, Any]:
    """One run in which a worker of many dies."""
    text = JOB.format(workers=WORKERS)
    killer, stops = Killer(), Stops()
    job = Job(
        spec=load(text, filename="job.yaml", environment={}),
        job_file=folder / "job.yaml",
        job_text=text.encode(),
        run_dir=RunDir(folder / "run"),
        cwd=folder,
        environment=os.environ,
        worker_argv=(sys.executable, str(Path(__file__).with_name("dummy_worker.py"))),
    )
    try:
        outcome = supervise(job, stops=stops, observers=[killer])
        gone_s = time.perf_counter() - killer.killed_at
    finally:
        stops.close()
    killer.join()
    return {
        "started_s": round(killer.started_s, 3),
        "noticed_s": round(killer.noticed_s, 4),
        "all_ended_s": round(gone_s, 3),
        "cause": outcome.reason,
        "left": len(carrying(outcome.state.run_id)),
    }


def carrying(run_id: str) -> list[int]:
    """Living processes of the run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_TOKEN) == run_id:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def deaths() -> dict[str, Any]:
    """Some runs, and the worst of each number."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = []
        for number in range(DEATHS):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            runs.append(death(folder))
    return {
        "workers": WORKERS,
        "noticed_s": max(run["noticed_s"] for run in runs),
        "all_ended_s": max(run["all_ended_s"] for run in runs),
        "left": sum(run["left"] for run in runs),
        "runs": runs,
    }


def main() -> None:
    """Prints what was measured."""
    various = replicas(DEVICES)
    report = {
        "devices": DEVICES,
        "global_batch_size": BATCH,
        "longest": {
            "all alike": measured(replicas(1)),
            "8 kinds": measured(replicas(8)),
            "no two alike": measured(various),
            "no speed measured": measured(
                [Replica(replica.micro_batch_max) for replica in various]
            ),
        },
        "death_of_a_worker": deaths(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
