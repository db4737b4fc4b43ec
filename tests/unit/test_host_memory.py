"""What is left of a supervisor that the kernel killed with its whole container."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from oomrun import host_memory, takeover
from oomrun.core import policy
from oomrun.core.diagnosis import Cause
from oomrun.core.policy import Fail, Limits, Restart
from oomrun.core.state import JobState
from oomrun.core.topology import Host

GIB = 2**30
LIMITS = Limits(max_restarts={"oom": 10})


def host(free: int, limit: int | None = 16 * GIB) -> Host:
    return Host(
        memory_total_bytes=64 * GIB,
        memory_available_bytes=64 * GIB,
        cgroup_limit_bytes=limit,
        cgroup_free_bytes=free,
    )


def test_it_is_kept_until_we_end(tmp_path: Path) -> None:
    path, looked = tmp_path / "host-memory.json", threading.Event()
    frees = [8 * GIB, 8 * GIB - 1, GIB // 4, GIB // 4]

    def read() -> Host:
        # What was read before has been written by the time of the next look.
        if len(frees) == 1:
            looked.set()
        return host(frees.pop(0) if len(frees) > 1 else frees[0])

    with host_memory.kept(path, read, every_s=0.001):
        assert looked.wait(60)
        said = host_memory.ran_out(path, host(8 * GIB))
        assert said == (
            "the whole container was killed while host memory was full: 15.8GiB of "
            "16GiB were in use"
        )
        assert host_memory.ran_out(path, host(8 * GIB, 24 * GIB)) == ""
        assert json.loads(path.read_bytes())["limit_bytes"] == 16 * GIB
    assert not path.exists()


def test_without_a_limit_nothing_is_kept(tmp_path: Path) -> None:
    looked = threading.Event()

    def read() -> Host:
        looked.set()
        return host(GIB, None)

    with host_memory.kept(tmp_path / "x", read):
        assert looked.wait(60)
        assert not (tmp_path / "x").exists()


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with host_memory.kept(file / "x", lambda: host(GIB), every_s=0.001):
        pass


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"used_bytes": 1, "limit_bytes": 0}',
     '{"used_bytes": 15000000000, "limit_bytes": 17179869184}'],
)  # fmt: skip
def test_what_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert host_memory.ran_out(tmp_path / "x", host(GIB)) == ""
    assert host_memory.ran_out(tmp_path / "none", host(GIB)) == ""


def test_the_same_again_only_where_it_moved() -> None:
    lost = JobState(attempt=1, attempt_open=True, step=5, step_at_attempt_start=5)
    ended = takeover.end_of_lost_attempt(lost, "memory was full")
    assert ended.cause is Cause.HOST_OOM
    assert isinstance(policy.decide(ended, lost, LIMITS), Fail)
    moved = JobState(attempt=1, attempt_open=True, step=9, step_at_attempt_start=5)
    assert isinstance(policy.decide(ended, moved, LIMITS), Restart)
    assert takeover.end_of_lost_attempt(lost).cause is Cause.PREEMPTION
