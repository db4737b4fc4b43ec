"""A wall clock that tests can set: for all of a command's processes, and only for them.

Covers: ``clock/jumping_clock.c``, built and put under a command. Does not cover: the
kernel's own waits until a time of day, which go by its own clock.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "clock" / "jumping_clock.c"


@dataclass(frozen=True)
class Clock:
    """The clock of those that are run with ``environment``."""

    library: Path
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """What gives a process this clock."""
        return {"LD_PRELOAD": str(self.library), "CLOCK_FILE": str(self.file)}

    def set_ahead(self, seconds: int) -> None:
        """The clock jumps to so many seconds after the machine's own, or before it."""
        with self.file.open("r+b") as file:
            # In place: the processes have mapped the file.
            file.write(struct.pack("=q", seconds))


def build(folder: Path) -> Clock:
    """Compiles the library into a folder, which is there; the clock is right."""
    clock = Clock(folder / "libclock.so", folder / "ahead")
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [*command, "-shared", "-fPIC", "-o", str(clock.library), str(SOURCE)],
        check=True,
    )
    clock.file.write_bytes(struct.pack("=q", 0))
    return clock
