"""Host memory: /proc, cgroups of both versions, and /dev/shm.

Covers: what the machine has, what the cgroup lets this process have and what it has
taken, and how often the kernel killed for memory in it.
Does not cover: the memory of other processes, or whether the host fits the job.

Whatever a file does not say is None in the ``Host``; nothing here raises.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from oomrun.core.topology import CPU_ID, Device, Host, Memory

# cgroup v1 says "no limit" as the largest number of whole pages.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What the two versions of cgroups call the same things."""

    limit: str
    used: str
    peak: str
    inactive: str  # the key in memory.stat: page cache that may be dropped
    events: str


_V1 = _Files(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    peak="memory.max_usage_in_bytes",
    inactive="total_inactive_file",
    events="memory.oom_control",
)
_V2 = _Files(
    limit="memory.max",
    used="memory.current",
    peak="memory.peak",
    inactive="inactive_file",
    events="memory.events",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cgroup:
    """This process's memory cgroup: the groups from its own up to the topmost seen."""

    version: int
    groups: tuple[Path, ...]

    @property
    def files(self) -> _Files:
        return _V1 if self.version == 1 else _V2


def read(root: Path = Path("/")) -> Host:
    """The host as this process sees it.

    Args:
        root: Where /proc, /sys and /dev are found; the tests bring a tree of their own.
    """
    total, available = _meminfo(root)
    shm_total, shm_free = _shm(root)
    cgroup = _cgroup(root)
    limits = _limits(cgroup)
    binding = min(limits, key=lambda limit: limit.total_bytes, default=None)
    used = None if binding is None else binding.used_bytes
    if cgroup is not None and binding is None:
        used = _number(cgroup.groups[0] / cgroup.files.used)
    return Host(
        memory_total_bytes=total,
        memory_available_bytes=available,
        cgroup_version=None if cgroup is None else cgroup.version,
        cgroup_limit_bytes=None if binding is None else binding.total_bytes,
        cgroup_used_bytes=used,
        cgroup_free_bytes=min((limit.free_bytes for limit in limits), default=None),
        oom_kill_count=_oom_kills(cgroup),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        cpu_count=_cpu_count(),
    )


def cpu(host: Host, root: Path = Path("/")) -> Device:
    """The CPU as a device, whose memory is what the cgroup or the machine gives."""
    memory = cpu_memory(host)
    return Device(
        id=CPU_ID,
        kind="cpu",
        name=_cpu_name(root),
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        used_bytes=memory.used_bytes,
    )


def cpu_memory(host: Host) -> Memory:
    """The memory of the CPU device."""
    free = min(host.free_bytes, host.limit_bytes)
    return Memory(
        total_bytes=host.limit_bytes,
        free_bytes=free,
        used_bytes=host.limit_bytes - free,
    )


def oom_kill_count(root: Path = Path("/")) -> int | None:
    """How many processes of this cgroup the kernel has killed for memory so far."""
    return _oom_kills(_cgroup(root))


def shm_free_bytes(root: Path = Path("/")) -> int | None:
    """What /dev/shm has left."""
    return _shm(root)[1]


def peak_bytes(root: Path = Path("/")) -> int | None:
    """The most that this cgroup has ever used; kernels before 5.19 do not tell."""
    cgroup = _cgroup(root)
    return None if cgroup is None else _number(cgroup.groups[0] / cgroup.files.peak)


def own_bytes(root: Path = Path("/")) -> int | None:
    """What this process holds that is not of files; None where /proc is missing."""
    pages = _own_pages(root)
    return None if pages is None else (pages[1] - pages[2]) * _page()


def room_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the host, and by its own rlimits."""
    room = read(root).free_bytes
    pages = _own_pages(root)
    if pages is not None:
        of_rlimits = ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5]))
        for which, used in of_rlimits:
            soft, _ = resource.getrlimit(which)
            if soft != resource.RLIM_INFINITY:
                room = min(room, soft - used * _page())
    return max(0, room)


def _own_pages(root: Path) -> tuple[int, ...] | None:
    """As proc_pid_statm(5): size, resident, shared, text, lib, data and stack."""
    fields = _text(root / "proc/self/statm").split()
    return tuple(map(int, fields)) if len(fields) == 7 else None


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def pressure_s(root: Path = Path("/")) -> dict[str, float]:
    """How long some, and all, processes waited for memory so far: cgroup or machine.

    Empty where the kernel does not count it.
    """
    cgroup = _cgroup(root)
    own = cgroup.groups[0] / "memory.pressure" if cgroup is not None else None
    text = (own and _text(own)) or _text(root / "proc/pressure/memory")
    found = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if kind in ("some", "full") and total.isdigit():
            found[kind] = int(total) / 1e6
    return found


# --- cgroups ------------------------------------------------------------------------


def _cgroup(root: Path) -> _Cgroup | None:
    """The memory cgroup of this process.

    A hybrid system mounts both versions; the one that has the memory controller counts.
    """
    memberships = [
        line.split(":", 2)
        for line in _text(root / "proc/self/cgroup").splitlines()
        if line.count(":") >= 2
    ]
    mounts = _mounts(root)
    for _, controllers, path in memberships:
        if "memory" in controllers.split(","):
            mount = mounts.get(1, (root / "sys/fs/cgroup/memory", "/"))
            return _with_ancestors(1, *mount, path)
    for number, controllers, path in memberships:
        if number == "0" and not controllers:
            mount = mounts.get(2, (root / "sys/fs/cgroup", "/"))
            return _with_ancestors(2, *mount, path)
    return None


def _mounts(root: Path) -> dict[int, tuple[Path, str]]:
    """Per cgroup version where its memory controller is mounted, and what of it."""
    found: dict[int, tuple[Path, str]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or len(kind) < 3:
            continue
        place = (root / fields[4].lstrip("/"), fields[3])
        if kind[0] == "cgroup2":
            found.setdefault(2, place)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            found.setdefault(1, place)
    return found


def _with_ancestors(
    version: int, mount: Path, mounted: str, path: str
) -> _Cgroup | None:
    """The groups from this process's own upwards, as far as they can be seen.

    A container sees its own group as the mount's root, while /proc may name it by its
    place on the host: what of the path does not exist here is left out.
    """
    parts = [part for part in path.split("/") if part]
    inside = [part for part in mounted.split("/") if part]
    if parts[: len(inside)] == inside:
        parts = parts[len(inside) :]
    if ".." in parts:  # outside of the cgroup namespace
        parts = []
    while parts and not mount.joinpath(*parts).is_dir():
        parts.pop()
    groups = tuple(mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))
    return _Cgroup(version=version, groups=groups) if mount.is_dir() else None


def _limits(cgroup: _Cgroup | None) -> list[Memory]:
    """The limits that hold, own group first; a parent's binds as much as one's own."""
    limits: list[Memory] = []
    for group in () if cgroup is None else cgroup.groups:
        files = cgroup.files if cgroup is not None else _V2
        limit = _number(group / files.limit)
        used = _number(group / files.used)
        if limit is None or limit >= _NO_LIMIT_BYTES or used is None:
            continue
        cache = _table(group / "memory.stat").get(files.inactive, 0)
        free = max(0, limit - max(0, used - cache))
        limits.append(Memory(total_bytes=limit, free_bytes=free, used_bytes=used))
    return limits


def _oom_kills(cgroup: _Cgroup | None) -> int | None:
    if cgroup is None:
        return None
    return _table(cgroup.groups[0] / cgroup.files.events).get("oom_kill")


# --- the rest of /proc, and /dev/shm ------------------------------------------------


def _meminfo(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    kib = _table(root / "proc/meminfo")
    total = kib.get("MemTotal:")
    if total is None:
        page = os.sysconf("SC_PAGE_SIZE")
        return (
            page * os.sysconf("SC_PHYS_PAGES"),
            page * os.sysconf("SC_AVPHYS_PAGES"),
        )
    # Kernels before 3.14 and some sandboxes have no MemAvailable.
    rest = kib.get("MemFree:", 0) + kib.get("Cached:", 0)
    return 1024 * total, 1024 * kib.get("MemAvailable:", rest)


def _shm(root: Path) -> tuple[int | None, int | None]:
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail


def _cpu_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        return os.cpu_count() or 1


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return " ".join(value.split())
    return "CPU"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The one number in a file; None for "max" and where there is no number."""
    try:
        return int(_text(path))
    except ValueError:
        return None


def _table(path: Path) -> dict[str, int]:
    """A file of lines "key number ..."."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
