"""Small disks of tests' own: real file systems that are full, or read-only, for some.

Covers: a tmpfs at a folder, in a mount namespace of its own, for commands that are run
inside it; it is gone when the last of them is. Does not cover: what is put there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# Holds the namespace until its input ends, as it does however the test ends.
_HOLDS = 'mount -t tmpfs -o "size=$1" none "$2" && echo mounted && exec cat'


@dataclass(frozen=True)
class Disk:
    """A small disk, which those see that are run inside.

    Attributes:
        folder: where it is, for those.
        holder: the process that holds it.
    """

    folder: Path
    holder: int

    def inside(self, cwd: Path) -> list[str]:
        """The words that run a command inside, with this folder as its own."""
        enter = ["nsenter", "-t", str(self.holder), "-U", "-m"]
        enter.append("--preserve-credentials")
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]

    def seen(self, path: Path) -> Path:
        """From outside, what is at ``path`` inside."""
        return Path(f"/proc/{self.holder}/root{path}")


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Disk]:
    """A disk of ``size`` (as ``mount`` takes it) at ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["unshare", "-rm", "sh", "-c", _HOLDS, "sh", size, str(folder)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != b"mounted\n":
                pytest.skip(f"no disk may be mounted: {holder.stderr.read()[:200]!r}")
            yield Disk(folder, holder.pid)
        finally:
            holder.stdin.close()


# What root may do to files whatever their permissions say: read, write, enter.
_PASS_OVER = "import ctypes, os, sys; " + "; ".join(
    f"ctypes.CDLL(None).prctl(24, {capability}, 0, 0, 0)" for capability in (1, 2)
)
#: The words that run a command for which permissions hold, also where we are root.
HELD_BY_PERMISSIONS = (
    sys.executable,
    "-c",
    f"{_PASS_OVER}; os.execvp(sys.argv[1], sys.argv[1:])",
)
