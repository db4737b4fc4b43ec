"""Crashes, signals, hangs, full host memory and odd machines, through the real command.

Cells of the fault matrix (``matrix``). Does not cover: kills at random moments
(``benchmarks/kills.py``), workers that stand in for real ones (``test_signals``).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import matrix
import pytest

import jumping_clock
from oomrun.core import events as ev

CRASHES = """
kind = os.environ["FAULT"]
if kind == "once" and MADE == 0 and step == 9:
    raise ValueError("once")
if kind == "always" and step == 9:
    raise ValueError("always")
if kind == "third" and MADE < 2 and step == 3 * (MADE + 1):
    raise ValueError("every third step")
"""


@pytest.mark.parametrize("cell", matrix.beginning("crash-"))
def test_the_script_crashes(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(CRASHES), matrix.JOB)
    kind = cell.removeprefix("crash-")
    code = job.run(env={"FAULT": kind})
    # Each crash of "third" is three steps further on than the one before.
    wanted = {"once": (0, 2), "always": (1, 2), "third": (0, 3)}[kind]
    assert (code, job.status()["attempts"]) == wanted, job.everything()
    if kind != "always":
        matrix.check_complete(job)
    else:
        # At the same place, with no step between: not a third time.
        assert "the same would happen again" in job.said()
        assert "ValueError at train.py:" in job.said()


# --- signals ------------------------------------------------------------------------

# The eighth step begins when we were asked to stop (or was waited for in vain), and no
# step after it is so short that the run could be over before it is heard.
LONG_STEP = """
if step == 7:
    open("in-the-step", "w").close()
    while os.environ["FAULT"] == "stuck" or not os.path.exists("asked"):
        time.sleep(0.05)
if step > 7:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    "cell", matrix.cells(["stopped-with-time", "stopped-without-time"])
)
def test_stopped_in_the_middle_of_a_step(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(LONG_STEP), matrix.JOB)
    enough = cell == "stopped-with-time"
    process = job.start(
        "--grace", "5min" if enough else "300ms",
        env={"FAULT": "slow" if enough else "stuck"},
    )  # fmt: skip
    _wait_for(job.folder / "in-the-step", process)
    process.send_signal(signal.SIGTERM)
    (job.folder / "asked").touch()
    assert process.wait(120) == 75, job.everything()
    assert jobs.gone(job)
    assert job.status()["state"] == "preempted"
    assert "the same command goes on" in job.said()
    saved = job.events(ev.CheckpointSaved)[-1]
    assert (saved.reason == "stop") == enough
    assert job.run() == 0, job.everything()
    (restored,) = job.events(ev.Restored)
    assert restored.name == saved.name
    matrix.check_complete(job)


HANGS = """
if step == 7 and first_time("hung"):
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("cell", matrix.cells(["hang"]))
def test_a_worker_hangs(tmp_path: Path, cell: str) -> None:
    # Longer than a start takes, also on a slow machine.
    text = matrix.JOB + "recovery: {hang_after: 60s}\n"
    job = jobs.make(tmp_path / "job", matrix.script(HANGS), text)
    assert job.run(env={"FAULT": "yes"}, timeout_s=550) == 0, job.everything()
    matrix.check_complete(job)
    status = job.status()
    assert (status["attempts"], status["restarts"]["hang"]) == (2, 1)
    # Where it hung is in its log, for a person.
    assert "train.py" in job.log(1).split("most recent call first", 1)[1]


# --- host memory --------------------------------------------------------------------

WANTS_MORE = """
if step == 7:
    import resource
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**28, hard))
    kept = np.ones(2**30)
"""


@pytest.mark.parametrize("cell", matrix.cells(["host-oom-limit"]))
def test_the_host_gives_no_more_memory(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(WANTS_MORE), matrix.JOB)
    assert job.run(env={"FAULT": "yes"}) == 1, job.everything()
    assert "host memory ran out at train.py:" in job.said()
    assert "A smaller micro-batch does not shrink" in job.said()
    assert job.run() == 0, job.everything()
    matrix.check_complete(job)


FILLS_MEMORY = """
if step == 7:
    kept = [np.ones(2**23) for _ in range(64)]
"""


@pytest.mark.parametrize("cell", matrix.cells(["host-oom-kernel"]))
def test_the_kernel_kills_the_worker(
    tmp_path: Path, limited: Sequence[str], cell: str
) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(FILLS_MEMORY), matrix.JOB)
    process = job.start(env={"FAULT": "yes"}, inside=limited)
    assert process.wait(300) == 1, job.everything()
    assert "the kernel killed the worker: host memory ran out" in job.said()
    assert jobs.gone(job)
    assert job.run() == 0, job.everything()
    matrix.check_complete(job)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Sequence[str]]:
    """The words that run a command in a cgroup of 2 GiB."""
    group = _own_group() / f"oomrun-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2 * 2**30))
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 may be made: {error}")
    yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    # It can be removed once the last of its processes has been reaped.
    until = time.monotonic() + 60
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    pytest.skip("no cgroup of version 1 has this process")


# --- odd machines -------------------------------------------------------------------

# The clock jumps before the sixth step, and the process dies under it.
JUMPS = """
import struct
if step == 5 and first_time("jumped"):
    with open(os.environ["CLOCK_FILE"], "r+b") as file:
        file.write(struct.pack("=q", int(os.environ["FAULT"])))
if step == 8 and MADE == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
DAY_S = 24 * 3600
# By how much, and whether the worker's clock jumps too: TensorFlow's own waits last
# longer by as much as the clock is set back.
CLOCKS = {
    "clock-forward": (10 * DAY_S, True),
    "clock-back": (-20, True),
    "clock-far-back": (-10 * DAY_S, False),
}


@pytest.mark.parametrize("cell", matrix.beginning("clock-"))
def test_the_clock_jumps(tmp_path: Path, cell: str) -> None:
    seconds, workers = CLOCKS[cell]
    text = matrix.JOB + ("" if workers else 'env: {LD_PRELOAD: ""}\n')
    job = jobs.make(tmp_path / "job", matrix.script(JUMPS), text)
    clock = jumping_clock.build(job.folder)
    assert job.run(env={**clock.environment, "FAULT": str(seconds)}) == 0, job.said()
    matrix.check_complete(job)
    assert job.status()["attempts"] == 2
    # It did jump.
    times = [event.at for event in job.events()]
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert any(abs(step - seconds) < abs(seconds) / 2 for step in steps)
    words = [*jobs.OOMRUN, "report", str(job.run_dir.path)]
    done = subprocess.run(words, env=jobs.environment(), cwd=tmp_path, timeout=120)
    assert done.returncode == 0


@pytest.mark.parametrize("cell", matrix.beginning("port-in-use-"))
def test_the_port_is_in_use(tmp_path: Path, cell: str) -> None:
    then = cell.removeprefix("port-in-use-")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        metrics = f'metrics: {{listen: "127.0.0.1:{port}", port_taken: {then}}}\n'
        job = jobs.make(tmp_path / "job", matrix.script("pass"), matrix.JOB + metrics)
        code = job.run()
    assert str(port) in job.said()
    assert "Traceback" not in job.said()
    if then == "next":
        assert code == 0, job.everything()
        matrix.check_complete(job)
    else:
        assert code == 4
        assert not list(job.folder.glob("start-*")), "the script was started"


WAITS = """
if step == 7:
    open("in-the-step", "w").close()
    while not os.path.exists("go-on"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("cell", matrix.cells(["two-supervisors"]))
def test_a_second_supervisor(tmp_path: Path, cell: str) -> None:
    job = jobs.make(tmp_path / "job", matrix.script(WAITS), matrix.JOB)
    process = job.start(env={"FAULT": "yes"})
    _wait_for(job.folder / "in-the-step", process)
    assert job.run() == 4
    said = f"runs/small: another oomrun is running this (pid {process.pid})"
    assert said in job.said()
    (job.folder / "go-on").touch()
    assert process.wait(300) == 0, job.everything()
    matrix.check_complete(job)
    assert job.status()["attempts"] == 1


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, "it has ended before"
        assert time.monotonic() < until, f"no {path.name}"
        time.sleep(0.05)
