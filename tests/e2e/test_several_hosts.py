"""Workers on another host, over a real ssh: this very machine, by another address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from killable import JOB, causes, drive, events, of_this_run, wait_for

import ssh_server
from oomrun import hosts
from oomrun.core import events as ev
from oomrun.core.errors import LaunchError
from oomrun.core.spec import Hostfile
from oomrun.rundir import RunDir

pytestmark = pytest.mark.skipif(
    ssh_server.SSHD is None, reason="sshd is not installed (Debian: openssh-server)"
)
THERE = "127.0.0.2"  # not an address that this host knows to be its own
TEXT = JOB + (
    f"strategy: horovod\nhosts: [localhost, {THERE}]\n"
    "recovery: {max_restarts: {crash: 0}}\n"
)


@pytest.fixture
def server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psutil.Process]:
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_server.running(folder, THERE) as (ssh, process):
        if why := ssh_server.refused(ssh, THERE):
            pytest.skip(f"sshd lets nobody in here: {why}")
        monkeypatch.setenv(hosts.SSH, ssh)
        yield process


def summaries(folder: Path) -> list[str]:
    return [e.summary for e in events(folder) if isinstance(e, ev.AttemptEnded)]


def nothing_left(folder: Path) -> bool:
    """Whether the other host's processes end, which nobody here waits for."""
    until = time.monotonic() + 60
    if not RunDir(folder / "runs" / "killable").journal.exists():
        return True
    while of_this_run(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def ended(folder: Path, mode: str, *options: str, code: int = 0) -> str:
    """What a run to its end has said."""
    process = drive(folder, mode, *options)
    try:
        found = process.wait(180)
    finally:
        process.kill()
        process.wait()
    said = (folder / "said").read_text()
    assert found == code, said
    assert nothing_left(folder)
    return said


@pytest.mark.usefixtures("server")
def test_both_finish(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    ended(folder, "finishes")
    (started,) = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    found = [(d["rank"], d["host"], d["id"]) for d in started.plan["devices"]]
    assert found == [(0, 0, "cpu:0"), (1, 1, "cpu:1")]
    ready = {e.rank: e.pid for e in events(folder) if isinstance(e, ev.WorkerReady)}
    assert set(ready) == {0, 1}


@pytest.mark.usefixtures("server")
def test_how_a_worker_over_there_ended_is_known(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    ended(folder, "hangs+kills-itself-once", code=1)
    assert summaries(folder) == [
        "worker 1: the worker was killed from outside (SIGKILL)"
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_one_over_there_is_ended_with_the_others(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    ended(folder, "exits-silently+deaf", code=1)
    (summary,) = summaries(folder)
    assert summary.startswith("worker 0: the worker ended without a report")


def test_a_lost_connection_ends_all_and_is_made_again(
    folder: Path, server: psutil.Process
) -> None:
    (folder / "job.yaml").write_text(TEXT.replace("crash: 0", "crash: 1"))
    process = drive(folder, "hangs-once")
    try:
        wait_for(folder, ev.WorkerReady, 2)
        assert ssh_server.closed_connections(server) > 0
        assert process.wait(180) == 0, (folder / "said").read_text()
    finally:
        process.kill()
        process.wait()
    assert causes(folder) == ["killed", "finished"], summaries(folder)
    assert summaries(folder)[0].startswith("worker 1: ")
    assert nothing_left(folder)


@pytest.mark.usefixtures("server")
def test_nothing_is_left_over_there_where_the_supervisor_dies(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT)
    process = drive(folder, "hangs")
    try:
        wait_for(folder, ev.WorkerReady, 2)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert nothing_left(folder)


def test_a_host_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hosts.SSH, "ssh -p 1")
    (folder / "job.yaml").write_text(TEXT)
    said = ended(folder, "finishes", "--meet-within", "5s", code=4)
    assert "member 1 of the gang did not come within 5s" in said
    assert f"{THERE}: ssh: connect to host {THERE} port 1: Connection refused" in said


def test_oomrun_is_called_on_one_of_the_hosts(folder: Path) -> None:
    (folder / "job.yaml").write_text(TEXT.replace("localhost, ", ""))
    assert "this one is not among them" in ended(folder, "finishes", code=4)


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
