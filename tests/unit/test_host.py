"""Host memory read from a tree of files like /proc, /sys and /dev."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from oomrun import host
from oomrun.core.topology import Host
from oomrun.devices import memory_of

GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 16777216 kB\n"
V2_MOUNT = "30 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str, **files: object) -> dict[str, str]:
    """A group's files; ``max`` stands for memory.max and so on."""
    folder = f"sys/fs/cgroup{path}"
    return {f"{folder}/memory.{name}": f"{text}\n" for name, text in files.items()}


def v1(path: str, limit: int, used: int, **more: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        **{f"{folder}/memory.{name}": text for name, text in more.items()},
    }


def cgroup(found: Host) -> tuple[int | None, ...]:
    return (
        found.cgroup_version,
        found.cgroup_limit_bytes,
        found.cgroup_used_bytes,
        found.cgroup_free_bytes,
        found.oom_kill_count,
    )


EVENTS = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n"

V2_CASES = {
    "no limit": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("/job", max="max", current=GIB, events=EVENTS),
        },
        (2, None, GIB, None, 1),
    ),
    "a limit, with page cache that can go": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2(
                "/job",
                max=8 * GIB,
                current=6 * GIB,
                stat=f"anon 5\ninactive_file {2 * GIB}\nactive_file 7",
                events=EVENTS,
            ),
        },
        (2, 8 * GIB, 6 * GIB, 4 * GIB, 1),
    ),
    "a parent's limit binds": (
        {
            "proc/self/cgroup": "0::/pod/main\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("/pod", max=4 * GIB, current=3 * GIB),
            **v2("/pod/main", max="max", current=GIB, events=EVENTS),
        },
        (2, 4 * GIB, 3 * GIB, GIB, 1),
    ),
    "the smaller limit and the tighter one are not the same": (
        {
            "proc/self/cgroup": "0::/pod/main\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("/pod", max=20 * GIB, current=19 * GIB),
            **v2("/pod/main", max=10 * GIB, current=2 * GIB),
        },
        (2, 10 * GIB, 2 * GIB, GIB, None),
    ),
    "used over the limit": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("", max=GIB, current=2 * GIB),
        },
        (2, GIB, 2 * GIB, 0, None),
    ),
    "the path is the host's, the mount the container's": (
        {
            "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("", max=2 * GIB, current=GIB, events="oom_kill 3"),
        },
        (2, 2 * GIB, GIB, GIB, 3),
    ),
    "the path is outside of the namespace": (
        {
            "proc/self/cgroup": "0::/../other\n",
            "proc/self/mountinfo": V2_MOUNT,
            **v2("", max=2 * GIB, current=GIB),
        },
        (2, 2 * GIB, GIB, GIB, None),
    ),
    "no mountinfo": (
        {"proc/self/cgroup": "0::/a\n", **v2("/a", max=2 * GIB, current=GIB)},
        (2, 2 * GIB, GIB, GIB, None),
    ),
}

V1_CASES = {
    "no limit is a huge number": (
        {
            "proc/self/cgroup": "4:memory:/job\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/"),
            **v1("/job", 9223372036854771712, GIB),
            **v1("", 9223372036854771712, 5 * GIB),
        },
        (1, None, GIB, None, None),
    ),
    "nested": (
        {
            "proc/self/cgroup": "9:cpu,memory:/a/b\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/"),
            **v1(
                "/a/b",
                6 * GIB,
                2 * GIB,
                stat=f"total_inactive_file {GIB}\n",
                oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            ),
            **v1("/a", 3 * GIB, 2 * GIB),
        },
        (1, 3 * GIB, 2 * GIB, GIB, 4),
    ),
    "a container mounts its own part": (
        {
            "proc/self/cgroup": "4:memory:/docker/77\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/docker/77"),
            **v1("", 2 * GIB, GIB),
        },
        (1, 2 * GIB, GIB, GIB, None),
    ),
    "a hybrid system counts the one with the memory controller": (
        {
            "proc/self/cgroup": "0::/x\n4:memory:/job\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/") + V2_MOUNT,
            **v1("/job", 2 * GIB, GIB),
            **v2("/x", max=GIB, current=0),
        },
        (1, 2 * GIB, GIB, GIB, None),
    ),
}

ODD_CASES = {
    "no cgroups at all": ({}, (None, None, None, None, None)),
    "a line that is no membership": (
        {"proc/self/cgroup": "nonsense\n"},
        (None, None, None, None, None),
    ),
    "nothing mounted": (
        {"proc/self/cgroup": "0::/a\n"},
        (None, None, None, None, None),
    ),
    "unreadable numbers": (
        {
            "proc/self/cgroup": "0::/a\n",
            **v2("/a", max="what", current="is this", events="\noom_kill x\n"),
        },
        (2, None, None, None, None),
    ),
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(files, expected, id=name)
        for name, (files, expected) in {**V2_CASES, **V1_CASES, **ODD_CASES}.items()
    ],
)
def test_cgroup(
    tmp_path: Path, files: dict[str, str], expected: tuple[int | None, ...]
) -> None:
    root = tree(tmp_path, files)
    assert cgroup(host.read(root)) == expected
    assert host.oom_kill_count(root) == expected[-1]


def test_meminfo(tmp_path: Path) -> None:
    found = host.read(tree(tmp_path, {}))
    assert found.memory_total_bytes == 32 * GIB
    assert found.memory_available_bytes == 16 * GIB


def test_meminfo_of_a_kernel_without_available(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 50 kB\n"
    found = host.read(tree(tmp_path, {"proc/meminfo": meminfo}))
    assert found.memory_available_bytes == 150 * 1024


def test_an_empty_machine_still_has_memory(tmp_path: Path) -> None:
    found = host.read(tmp_path)
    assert found.memory_total_bytes > 0
    assert found.shm_total_bytes is None
    assert found.cpu_count >= 1


def test_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = host.read(tmp_path)
    assert found.shm_total_bytes is not None
    assert found.shm_free_bytes is not None
    assert 0 <= found.shm_free_bytes <= found.shm_total_bytes


def test_the_cpu_device_has_what_the_cgroup_gives(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Some  CPU\n",
        **v2("/a", max=4 * GIB, current=GIB),
    }
    root = tree(tmp_path, files)
    device = host.cpu(host.read(root), root)
    assert (device.id, device.name) == ("cpu:0", "Some CPU")
    assert (device.total_bytes, device.free_bytes) == (4 * GIB, 3 * GIB)


def test_memory_is_read_again_just_before_a_start__pitfall_22(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **v2("/a", max=4 * GIB, current=GIB)}
    root = tree(tmp_path, files)
    before = memory_of("cpu:0", root=root)
    (root / "sys/fs/cgroup/a/memory.current").write_text(f"{2 * GIB}\n")
    after = memory_of("cpu:0", root=root)
    assert (before.free_bytes, after.free_bytes) == (3 * GIB, 2 * GIB)  # type: ignore[union-attr]


def test_what_this_process_holds() -> None:
    before = host.own_bytes()
    assert before is not None
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE) as held:
        for page in range(0, 64 << 20, mmap.PAGESIZE):
            held[page] = 1
        after = host.own_bytes()
    assert after is not None
    assert after - before > 60 << 20


def test_files_that_are_read_are_not_held(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/statm": "5000 900 300 10 0 700 0\n"})
    assert host.own_bytes(root) == 600 * os.sysconf("SC_PAGE_SIZE")
    assert host.own_bytes(tmp_path / "nothing") is None


def test_what_may_still_be_taken(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **v2("/a", max=4 * GIB, current=GIB)}
    assert host.room_bytes(tree(tmp_path, files)) <= 3 * GIB
    assert host.room_bytes(tree(tmp_path, v2("/a", max=4 * GIB, current=5 * GIB))) >= 0


@pytest.mark.parametrize("which", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_process_s_own_counts(which: int) -> None:
    """In a process that may die of it."""
    code = f"""
import resource
from oomrun import host
pages = [int(n) for n in open("/proc/self/statm").read().split()]
used = pages[5 if {which} == resource.RLIMIT_DATA else 0] * resource.getpagesize()
resource.setrlimit({which}, (used + 64 * 2**20, used + 64 * 2**20))
print(host.room_bytes())
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert 48 << 20 < int(said) <= 64 << 20
