"""One run on several hosts: here two processes of the command in one folder.

Covers: real supervisor, member and workers, over real connections; hosts that are
killed, asked to go, missing or not the same. Does not cover: TensorFlow
(``test_pods``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from killable import JOB, causes, drive, events, of_this_run, wait_for

from oomrun.core import events as ev
from oomrun.rundir import RunDir

TWO = (
    JOB.replace('"127.0.0.1:0"', "none")
    + "strategy: horovod\nrecovery: {max_restarts: {crash: 1}}\n"
)


class Hosts:
    """The members of a gang, by their numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        with socket.socket() as sock:
            sock.bind(("", 0))
            self.meet = f"127.0.0.1:{sock.getsockname()[1]}"

    def start(self, member: int, mode: str, *more: str) -> subprocess.Popen[bytes]:
        made = drive(
            self.folder, mode, "--gang", "2", "--member", str(member),
            "--meet", self.meet, *more,
        )  # fmt: skip
        self.processes[member] = made
        return made

    def both(self, mode: str) -> None:
        for member in (0, 1):
            self.start(member, mode)

    def codes(self) -> list[int]:
        return [self.processes[member].wait(240) for member in (0, 1)]

    def said(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture
def hosts(folder: Path) -> Iterator[Hosts]:
    (folder / "job.yaml").write_text(TWO)
    made = Hosts(folder)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()


def ends(folder: Path) -> list[ev.AttemptEnded]:
    return [e for e in events(folder) if isinstance(e, ev.AttemptEnded)]


def test_workers_on_two_hosts(hosts: Hosts, folder: Path) -> None:
    hosts.both("finishes")
    assert hosts.codes() == [0, 0], hosts.said()
    (started,) = [e for e in events(folder) if isinstance(e, ev.AttemptStarted)]
    devices = [(d["rank"], d["host"], d["id"]) for d in started.plan["devices"]]
    assert devices == [(0, 0, "cpu:0"), (1, 1, "cpu:1")]
    ready = {e.rank: e.pid for e in events(folder) if isinstance(e, ev.WorkerReady)}
    assert tuple(ready[rank] for rank in (0, 1)) == started.pids
    attempt = RunDir(folder / "runs" / "killable").attempt(1)
    assert attempt.log(0).exists()
    assert attempt.log(1).exists()
    # The supervisor has gone; its journal says that all is done.
    assert hosts.start(1, "finishes").wait(240) == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_is_killed(hosts: Hosts, folder: Path, killed: int) -> None:
    hosts.both("hangs-once")
    wait_for(folder, ev.WorkerReady, 2)
    hosts.processes[killed].kill()
    hosts.processes[killed].wait()
    hosts.start(killed, "hangs-once")
    assert hosts.codes() == [0, 0], hosts.said()
    first, last = ends(folder)
    assert last.cause == "finished"
    if killed:
        assert (first.cause, first.rank) == ("killed", 1)
        assert first.summary.startswith("worker 1: the worker is gone with member 1")
    else:
        assert "the supervisor of the run is gone" in hosts.said()
    assert not of_this_run(folder)


def test_a_worker_of_another_host_dies(hosts: Hosts, folder: Path) -> None:
    """All start anew, and no host has to be replaced for it."""
    hosts.both("hangs-once+kills-itself-once")
    assert hosts.codes() == [0, 0], hosts.said()
    first, _ = ends(folder)
    assert (first.rank, first.signal) == (1, signal.SIGKILL)


def test_it_fails_for_good(hosts: Hosts, folder: Path) -> None:
    """The others end as the first host does, so that nobody starts them again."""
    hosts.both("waits-untrained+exits-silently")
    assert hosts.codes() == [1, 1], hosts.said()
    assert causes(folder) == ["crash", "crash"]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_host_has_to_go(hosts: Hosts, folder: Path, asked: int) -> None:
    hosts.both("stops-well")
    wait_for(folder, ev.WorkerReady, 2)
    hosts.processes[asked].send_signal(signal.SIGTERM)
    assert hosts.codes() == [75, 75], hosts.said()
    assert causes(folder) == ["preemption"]
    hosts.both("finishes")
    assert hosts.codes() == [0, 0], hosts.said()


def test_nothing_is_left_of_a_worker(hosts: Hosts, folder: Path) -> None:
    hosts.both("finishes+grandchildren")
    assert hosts.codes() == [0, 0], hosts.said()
    for pid in map(int, (folder / "pids").read_text().split()):
        assert not psutil.pid_exists(pid) or (
            psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        )


def test_the_others_do_not_come(hosts: Hosts) -> None:
    code = hosts.start(0, "finishes", "--meet-within", "100ms").wait(240)
    assert code == 4
    assert "member 1 of the gang did not come within" in hosts.said()
    code = hosts.start(1, "finishes", "--meet-within", "100ms").wait(240)
    assert code == 4
    assert "the supervisor of the run cannot be reached" in hosts.said()


def test_asked_to_stop_while_waiting(hosts: Hosts, folder: Path) -> None:
    for member in (0, 1):
        process = hosts.start(member, "finishes")
        until = time.monotonic() + 120
        # Both listen to signals from before they begin to wait.
        while "waiting for" not in hosts.said() and member == 0:
            assert time.monotonic() < until
            time.sleep(0.02)
        if member == 0:
            process.send_signal(signal.SIGTERM)
            assert process.wait(240) == 75, hosts.said()


def test_another_job_file(hosts: Hosts, folder: Path) -> None:
    first = hosts.start(0, "finishes", "--meet-within", "60s")
    (folder / "other").mkdir()
    (folder / "other" / "job.yaml").write_text(TWO + "args: [x]\n")
    (folder / "other" / "train.py").touch()
    here = os.getcwd()
    os.chdir(folder / "other")
    try:
        other = Hosts(folder / "other")
        other.meet = hosts.meet
        assert other.start(1, "finishes").wait(240) == 4
        assert "it has another job file, or another version" in other.said()
    finally:
        os.chdir(here)
    hosts.start(1, "finishes")
    assert hosts.codes() == [0, 0], hosts.said()
    assert first.returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gang", "2"], "--gang needs --meet HOST:PORT"),
        (["--gang", "2", "--meet", "a:1", "--member", "2"], "--member must be 0 to 1"),
        (["--gang", "2", "--meet", "a"], "is no address such as host-0:18999"),
        (["--gang", "2", "--meet", "a:1", "--member", "-1"], "is no number"),
    ],
)
def test_options_that_cannot_be(folder: Path, options: list[str], said: str) -> None:
    assert drive(folder, "finishes", *options).wait(240) == 2
    assert said in (folder / "said").read_text()


def test_who_has_taken_the_supervisors_place_is_not_obeyed(
    hosts: Hosts, folder: Path
) -> None:
    """It would have its programs started; nobody else has the run's key."""
    hosts.both("stops-well")
    wait_for(folder, ev.WorkerReady, 2)
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.codes() == [75, 75], hosts.said()
    guess = {"do": "prove", "nonce": "n", "proof": "0" * 64}
    start = {"do": "start", "rank": 1, "launch": {}, "told": {}}
    leave = {"do": "leave", "exit_code": 0}
    for told in ([], [start, leave], [guess, start, leave]):
        assert answered(hosts, told) == 4, hosts.said()
    assert hosts.said().count("is not the supervisor of this run") == 3
    assert len([e for e in events(folder) if isinstance(e, ev.WorkerReady)]) == 2


def answered(hosts: Hosts, told: list[dict[str, Any]]) -> int:
    """How a member ends that gets this from whoever listens for it."""
    host, _, port = hosts.meet.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(0.2)
        process = hosts.start(1, "finishes", "--meet-within", "1s")
        while process.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(60)
                    lines = connection.makefile()
                    assert "proof" not in json.loads(lines.readline())
                    for message in told:
                        connection.sendall(json.dumps(message).encode() + b"\n")
                    connection.shutdown(socket.SHUT_WR)
                    # Nothing more is said to a stranger: no proof, no inventory.
                    assert lines.read() == ""
    return process.wait(60)


def test_the_key_is_told_nowhere(hosts: Hosts, folder: Path) -> None:
    hosts.both("finishes")
    assert hosts.codes() == [0, 0], hosts.said()
    run_dir = RunDir(folder / "runs" / "killable")
    key = run_dir.key.read_bytes()
    written = [p for p in folder.rglob("*") if p.is_file() and p != run_dir.key]
    assert len(key) == 64
    assert not [path for path in written if key in path.read_bytes()]
