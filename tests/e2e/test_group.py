"""The real supervisor loop with several workers, some of which die or hang."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killable import JOB, QUICK, causes, events, of_this_run

from oomrun.core import events as ev
from oomrun.core.state import JobState
from oomrun.rundir import RunDir
from oomrun.stops import Stops
from oomrun.supervisor import Outcome

TWO = JOB.replace("{cpu: 1, memory: [300MiB]}", "{cpu: 2, memory: [300MiB, 100MiB]}")
TWO += "strategy: horovod\nrecovery: {max_restarts: {crash: 0}}\n"
# A slow machine may take its time between one worker's end and the other's.
PATIENT = replace(QUICK, lost_s=60.0, others_kill_after_s=0.3)

Run = Callable[..., Outcome]


@pytest.fixture
def two(run: Run) -> Run:
    """Supervises two workers."""

    def call(mode: str, **settings: Any) -> Outcome:
        return run(mode, text=TWO, timing=PATIENT, **settings)

    return call


def summaries(folder: Path) -> list[str]:
    return [e.summary for e in events(folder) if isinstance(e, ev.AttemptEnded)]


def test_two_that_finish(two: Run, folder: Path) -> None:
    outcome = two("finishes+finishes")
    assert (outcome.exit_code, outcome.state.state) == (0, "completed")
    ready = [e for e in events(folder) if isinstance(e, ev.WorkerReady)]
    assert sorted(e.rank for e in ready) == [0, 1]
    (started,) = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    assert len(set(started.pids)) == 2
    limits = [(d["rank"], d["id"], d["limit_bytes"]) for d in started.plan["devices"]]
    assert limits == [(0, "cpu:0", 300 * 2**20), (1, "cpu:1", 100 * 2**20)]
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    assert attempt.log(0).exists()
    assert attempt.log(1).exists()


@pytest.mark.parametrize("others", ["hangs", "deaf", "not-ready"])
def test_where_one_fails_all_are_ended(two: Run, folder: Path, others: str) -> None:
    outcome = two(f"{others}+exits-silently")
    assert (outcome.exit_code, outcome.state.failed_rank) == (1, 1)
    (summary,) = summaries(folder)
    assert summary == "worker 1: the worker ended without a report (exit code 1)"
    assert of_this_run(folder) == []


def test_the_first_worker_may_fail_too(two: Run, folder: Path) -> None:
    two("raises+hangs")
    assert summaries(folder) == ["worker 0: ValueError at t.py:3: no"]


def test_who_lost_another_is_not_the_cause(two: Run, folder: Path) -> None:
    outcome = two("loses-another+kills-itself-once")
    assert summaries(folder)[0] == (
        "worker 1: the worker was killed from outside (SIGKILL)"
    )
    assert outcome.exit_code == 1


def test_one_that_runs_out_of_memory_gets_a_smaller_micro_batch(
    two: Run, folder: Path
) -> None:
    outcome = two("finishes+ooms-above-2")
    assert causes(folder) == ["device_oom", "device_oom", "finished"]
    started = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    sizes = [[d["micro_batch_size"] for d in e.plan["devices"]] for e in started]
    # The first worker's stays.
    assert sizes == [[None, None], [None, 4], [None, 2]]
    assert outcome.state.failed_by_rank == {1: 4}


def test_who_is_lost_and_still_there_hangs(run: Run, folder: Path) -> None:
    timing = replace(PATIENT, lost_s=2.0, dump_s=5.0)
    outcome = run(
        "loses-another+hangs",
        text=TWO.replace("crash: 0", "crash: 0, hang: 1"),
        timing=timing,
    )
    assert (outcome.exit_code, causes(folder)) == (1, ["hang", "hang"])
    assert summaries(folder)[0].startswith("worker 1: the worker stopped reporting")
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    assert "in forever" in attempt.log(1).read_text()
    assert of_this_run(folder) == []


def test_one_that_is_frozen_is_ended_too(run: Run, folder: Path) -> None:
    timing = replace(PATIENT, hang_after=3.0, dump_s=1.0)
    outcome = run(
        "hangs+freezes", text=TWO.replace("crash: 0", "hang: 0"), timing=timing
    )
    assert (outcome.exit_code, causes(folder)) == (1, ["hang"])
    assert of_this_run(folder) == []


def test_one_that_outlives_the_first_may_hang(run: Run, folder: Path) -> None:
    timing = replace(PATIENT, hang_after=3.0, dump_s=1.0)
    outcome = run(
        "finishes+freezes", text=TWO.replace("crash: 0", "hang: 0"), timing=timing
    )
    assert (outcome.exit_code, causes(folder)) == (1, ["hang"])
    assert outcome.state.failed_rank == 1
    assert of_this_run(folder) == []


def test_where_one_hangs_all_say_where_they_are(run: Run, folder: Path) -> None:
    timing = replace(PATIENT, hang_after=5.0, dump_s=5.0)
    outcome = run("hangs-once+hangs-once", text=TWO, timing=timing)
    assert (outcome.exit_code, causes(folder)) == (0, ["hang", "finished"])
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    for rank in range(2):
        assert "in forever" in attempt.log(rank).read_text()
    assert of_this_run(folder) == []


def test_both_are_asked_to_stop(two: Run, folder: Path, stops: Stops) -> None:
    def stop(state: JobState, event: ev.Event) -> None:
        if isinstance(event, ev.Progressed) and event.step == 2:
            stops.request(signal.SIGTERM)

    outcome = two("stops-well+stops-well", observers=(stop,))
    assert outcome.state.state == "preempted"
    assert of_this_run(folder) == []
