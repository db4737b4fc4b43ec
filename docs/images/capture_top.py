"""Draws top.svg: `oomrun top` on a terminal of 110 x 13, with two runs.

    PYTHONPATH=tests:docs/images python docs/images/capture_top.py [SVG]

Needs the extras `test`. One is the run whose journal is in tests/data/watched_run; the
other is the first half of the same journal, with its lock held as a supervisor does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from capture import drawn, write

import history
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.rundir import RunDir
from terminals import Terminal

COLUMNS, ROWS = 110, 13


def main() -> int:
    """Runs `oomrun top`, and draws what it shows."""
    here = Path(__file__).resolve().parent
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "top.svg"
    events = history.watched_run(end=time.time() - 240)
    half = next(
        at for at, event in enumerate(events) if isinstance(event, ev.RunResumed)
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        journal(RunDir(runs / "night"), events)
        going = RunDir(runs / "today")
        journal(going, events[:half])
        with going.locked():
            screen = Terminal(COLUMNS, ROWS, ["-m", "oomrun", "top"], Path(folder))
            screen.until("today")
            picture = drawn(screen.screen)
            screen.type(b"q")
            screen.end()
            screen.close()
    write(picture, target, COLUMNS, "oomrun top")
    return 0


def journal(run_dir: RunDir, events: Sequence[ev.Event]) -> None:
    """Writes the run's folder."""
    run_dir.create()
    lines = (json.dumps(event_json.to_json(event)) + "\n" for event in events)
    run_dir.journal.write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
