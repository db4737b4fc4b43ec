"""Draws live.svg: a real run of the quickstart on a terminal of 96 x 16.

    python docs/images/capture.py [SVG]

Needs the extras `test`. Runs in a temporary folder, takes a minute or two.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
JOB = HERE.parents[1] / "configs" / "quickstart" / "job.yaml"
COLUMNS, ROWS = 96, 16
COLOURS = {"brown": "yellow", "default": ""}  # pyte's words for them


def main() -> int:
    """Runs the job, and draws its last picture in the middle of an epoch."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "live.svg"
    with tempfile.TemporaryDirectory() as folder:
        picture = capture(folder)
    write(picture, target, COLUMNS, "oomrun job.yaml")
    return 0


def write(picture: Text, target: Path, columns: int, title: str) -> None:
    """Writes the picture as SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=columns, record=True, file=nowhere)
        console.print(picture)
        drawing = console.export_svg(title=title)
    # Its fonts would be fetched from another host; any monospaced one will do.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL))


def capture(folder: str) -> Text:
    """The view as it was when the second epoch was last seen under way."""
    pid, descriptor = pty.fork()
    if pid == 0:
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(1, termios.TIOCSWINSZ, size)
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        settings = ["--set", "metrics.listen=none"]
        os.execv(
            sys.executable,
            [sys.executable, "-m", "oomrun", str(JOB), "--view", "live", *settings],
        )
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    picture = Text()
    while True:
        try:
            stream.feed(os.read(descriptor, 65536))
        except OSError:  # the other end has closed
            break
        halfway = any(line.startswith("epoch 2/3") for line in screen.display)
        if halfway and "training" in screen.display[0]:
            picture = drawn(screen)
    os.waitpid(pid, 0)
    return picture


def drawn(screen: Any) -> Text:
    """The screen with its colours, as one text."""
    lines = []
    for row in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            words = ["bold" if cell.bold else "", "reverse" if cell.reverse else ""]
            words += [COLOURS.get(cell.fg, cell.fg)]
            line.append(cell.data, " ".join(filter(None, words)))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


if __name__ == "__main__":
    sys.exit(main())
