"""Workers on another host, over a real ssh: this very machine, by another address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from killable import JOB, QUICK, causes, drive, events, of_this_run, wait_for

import ssh_server
from oomrun import hosts
from oomrun.core import events as ev
from oomrun.core.errors import LaunchError, ProbeError
from oomrun.core.spec import Hostfile
from oomrun.core.state import JobState
from oomrun.rundir import RunDir
from oomrun.supervisor import Outcome

pytestmark = pytest.mark.skipif(
    ssh_server.SSHD is None, reason="sshd is not installed (Debian: openssh-server)"
)
THERE = "127.0.0.2"  # not an address that this host knows to be its own
TEXT = JOB + (
    f"strategy: horovod\nhosts: [localhost, {THERE}]\n"
    "recovery: {max_restarts: {crash: 0}}\n"
)
PATIENT = replace(QUICK, lost_s=60.0, others_kill_after_s=0.3)

Run = Callable[..., Outcome]


@pytest.fixture
def server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psutil.Process]:
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_server.running(folder, THERE) as (ssh, process):
        monkeypatch.setenv(hosts.SSH, ssh)
        yield process


def summaries(folder: Path) -> list[str]:
    return [e.summary for e in events(folder) if isinstance(e, ev.AttemptEnded)]


def nothing_left(folder: Path) -> bool:
    """Whether the other host's processes end, which nobody here waits for."""
    until = time.monotonic() + 60
    while of_this_run(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.usefixtures("server")
def test_both_finish(run: Run, folder: Path) -> None:
    outcome = run("finishes", text=TEXT, timing=PATIENT)
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    assert outcome.exit_code == 0, attempt.log(1).read_text()
    (started,) = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    found = [(d["rank"], d["host"], d["id"]) for d in started.plan["devices"]]
    assert found == [(0, "", "cpu:0"), (1, THERE, "cpu:1")]
    ready = {e.rank: e.pid for e in events(folder) if isinstance(e, ev.WorkerReady)}
    assert set(ready) == {0, 1}
    # The one that we started is ssh; the worker is over there.
    assert ready[1] != started.pids[1]
    assert nothing_left(folder)


@pytest.mark.usefixtures("server")
def test_how_a_worker_over_there_ended_is_known(run: Run, folder: Path) -> None:
    outcome = run("hangs+kills-itself-once", text=TEXT, timing=PATIENT)
    assert outcome.exit_code == 1
    assert summaries(folder) == [
        "worker 1: the worker was killed from outside (SIGKILL)"
    ]
    assert nothing_left(folder)


@pytest.mark.usefixtures("server")
def test_one_over_there_is_ended_with_the_others(run: Run, folder: Path) -> None:
    run("exits-silently+deaf", text=TEXT, timing=PATIENT)
    (summary,) = summaries(folder)
    assert summary.startswith("worker 0: the worker ended without a report")
    assert nothing_left(folder)


@pytest.mark.usefixtures("server")
def test_one_over_there_says_where_it_hangs(run: Run, folder: Path) -> None:
    timing = replace(PATIENT, hang_after=5.0, dump_s=2.0)
    run("hangs-once", text=TEXT, timing=timing)
    assert causes(folder) == ["hang", "finished"]
    log = RunDir(folder / "runs" / "killable").attempt(1).log(1)
    assert "in forever" in log.read_text()
    assert nothing_left(folder)


def test_a_lost_connection_ends_all(
    run: Run, folder: Path, server: psutil.Process
) -> None:
    closed: list[int] = []
    ready: set[int] = set()

    def cut(state: JobState, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerReady):
            ready.add(event.rank)
            if len(ready) == 2:
                closed.append(ssh_server.closed_connections(server))

    outcome = run("hangs", text=TEXT, timing=PATIENT, observers=(cut,))
    assert closed[0] > 0
    assert outcome.state.failed_rank == 1
    assert summaries(folder) == [
        f"worker 1: the connection to {THERE} was lost (ssh ended with 255)"
    ]
    assert nothing_left(folder)


@pytest.mark.usefixtures("server")
def test_nothing_is_left_over_there_where_the_supervisor_dies(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    process = drive(folder, "slow")
    try:
        wait_for(folder, ev.WorkerReady, 2)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert nothing_left(folder)


def test_a_host_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hosts.SSH, "ssh -p 1")
    with pytest.raises(ProbeError, match=f"{THERE}: its devices cannot be read over"):
        run("finishes", text=TEXT)


def test_hosts_of_slurm_and_of_a_hostfile(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    slurm = {"SLURM_JOB_NODELIST": "127.0.0.[2-3],127.0.0.1"}
    wanted = {"127.0.0.2": "127.0.0.2", "127.0.0.3": "127.0.0.3", "127.0.0.1": ""}
    assert hosts.of_job("slurm", job, slurm) == wanted
    (tmp_path / "all").write_text("127.0.0.2 slots=2\n127.0.0.3:2 # b\n127.0.0.1\n")
    assert hosts.of_job(Hostfile("all"), job, {}) == wanted
    with pytest.raises(LaunchError, match="this is no job of Slurm's"):
        hosts.of_job("slurm", job, {})
    with pytest.raises(LaunchError, match="no such file"):
        hosts.of_job(Hostfile("none"), job, {})
    with pytest.raises(LaunchError, match="of one"):
        hosts.of_job(("127.0.0.1", "localhost"), job, {})
