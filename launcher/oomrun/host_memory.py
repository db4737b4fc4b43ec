"""How full the host's memory is, kept on disk for whoever comes after a SIGKILL.

Covers: looking at it every second, in a file of the run's; what that file tells when
the supervisor has been killed. Does not cover: what follows (``core.policy``).

Where the kernel kills a container for its memory it kills all of it, us included. Then
nobody sees why, and the next supervisor would take it for a machine that went away, and
do the same again. So the last look is on the volume, and is gone where we end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from oomrun.core.errors import PlatformError
from oomrun.core.topology import Host
from oomrun.core.units import format_bytes
from oomrun.rundir import write_atomically

__all__ = ["kept", "ran_out"]

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
# So much of it must have been in use, page cache that can be dropped not counted.
_FULL = 0.95
# Before that nothing is written, and later no change of less than this.
_NOTABLE, _STEP = 0.8, 0.02


@contextlib.contextmanager
def kept(
    path: Path, read: Callable[[], Host], every_s: float = _EVERY_S
) -> Iterator[None]:
    """Keeps how full the memory of our cgroup is in a file, until we end by ourselves.

    Args:
        path: the file.
        read: reads the host.
        every_s: between two looks.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_look, args=(path, read, every_s, ended), name="oomrun-host", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _look(
    path: Path, read: Callable[[], Host], every_s: float, ended: threading.Event
) -> None:
    written: float | None = None
    while not ended.is_set():
        host = read()
        limit = host.cgroup_limit_bytes
        if limit:
            used = max(0, limit - host.free_bytes)
            share = used / limit
            news = share >= _NOTABLE if written is None else _changed(share, written)
            if news:
                written = share
                said = {"used_bytes": used, "limit_bytes": limit}
                try:
                    write_atomically(path, json.dumps(said).encode())
                except PlatformError as error:
                    _log.warning("how full the memory is cannot be kept: %s", error)
                    return
        ended.wait(every_s)


def _changed(share: float, written: float) -> bool:
    return abs(share - written) >= _STEP


def ran_out(path: Path, now: Host) -> str:
    """What the file of a supervisor that was killed says, if memory had run out.

    Args:
        path: the file.
        now: the host now: with more memory than then it may be enough.

    Returns:
        One sentence, "" where nothing says so.
    """
    try:
        said = json.loads(path.read_bytes())
        used, limit = int(said["used_bytes"]), int(said["limit_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if limit <= 0 or used < _FULL * limit or (now.cgroup_limit_bytes or 0) > limit:
        return ""
    return (
        "the whole container was killed while host memory was full: "
        f"{format_bytes(used)} of {format_bytes(limit)} were in use"
    )
