"""``oomrun report RUN_DIR``: a run as one HTML file that opens without a network.

Covers: finding the run, reading its journal, writing the file. Does not cover: the page
(``oomrun.report``).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from oomrun import __version__, journal, report
from oomrun.cli.status_command import find_run, not_a_run, supervisor_alive
from oomrun.core.errors import OomrunError
from oomrun.rundir import write_atomically

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Adds ``report`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="write a run as one HTML file",
        description="Write a run as one HTML file: attempts and decisions, memory, "
        "loss, throughput, micro-batches, checkpoints, and the reports of each time "
        "memory ran out. It needs no network and runs no script.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the run's folder, or its name under runs/"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write it; - is standard output; default: report.html in the "
        "run's folder",
    )
    parser.set_defaults(handler=write_report)


def write_report(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    run_dir = find_run(Path(args.run_dir))
    if run_dir is None:
        print(f"oomrun: {not_a_run(Path(args.run_dir))}", file=sys.stderr)
        return 2
    try:
        text = report.render(
            journal.read(run_dir.journal),
            moment=_moment,
            supervisor_alive=supervisor_alive(run_dir),
            version=__version__,
        )
        content = text.encode("utf-8", "replace")
        if args.output == "-":
            print(content.decode("utf-8"), end="")
            return 0
        target = run_dir.report if args.output is None else Path(args.output)
        write_atomically(target, content)
    except OomrunError as error:
        print(f"oomrun: {error}", file=sys.stderr)
        return error.exit_code
    print(target)
    return 0


def _moment(at: float) -> str:
    """A time in UTC; one that no calendar has, as it is."""
    try:
        found = datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc)
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s after 1970"
    return f"{found:%Y-%m-%d %H:%M:%S} UTC"
