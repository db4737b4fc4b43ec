"""``oomrun top [RUN ...]``: how runs go, drawn again and again until `q` is pressed.

Covers: when it is drawn, and what a pipe gets instead. Does not cover: finding and
following runs (``watching.py``), the pictures (``overview.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

__all__ = ["add_parser", "top"]

_EVERY_S = 1.0
_PIPE_WIDTH = 100
_NONE = "there are no runs under runs/; name one, or go to the folder of the job"


def add_parser(subparsers: Any) -> None:
    """Adds ``top`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "top",
        help="watch runs on the terminal",
        description="Watch runs on the terminal; print how they stand, once, into a "
        "pipe. Keys: up and down choose a run, enter shows it, o all runs, e what "
        "happened, q ends.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="a run's folder, or its name under runs/ (default: all of those)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print how they stand, once"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, once: one object a run"
    )
    parser.set_defaults(handler=top)


def top(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from oomrun.cli.watching import Watching
    from oomrun.core.errors import PlatformError

    try:
        watching = Watching(args.runs)
    except PlatformError as error:
        print(f"oomrun: {error}", file=sys.stderr)
        return 2
    watching.look()
    can_draw = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    if args.json:
        print(json.dumps([_json(run) for run in watching.runs], indent=2))
        return 0
    if not watching.runs:
        print(f"oomrun: {_NONE}", file=sys.stderr)
        return 2
    if args.once or not can_draw:
        _print(watching.runs)
        return 0
    return _draw(watching)


def _json(run: Any) -> dict[str, Any]:
    from oomrun.core.status import status_json

    return {
        "path": str(run.run_dir.path),
        "standing": run.standing,
        "trouble": run.trouble or None,
        **status_json(run.state),
        "supervisor_alive": run.alive,
    }


def _print(runs: Any) -> None:
    from oomrun.cli.glyphs import ASCII, UNICODE
    from oomrun.cli.live import is_unicode
    from oomrun.cli.overview import Shown, picture

    glyphs = UNICODE if is_unicode(sys.stdout) else ASCII
    for number, run in enumerate(runs):
        lines = picture(
            [run], Shown(view="run"), width=_PIPE_WIDTH, height=40, now=time.time(),
            glyphs=glyphs,
        )  # fmt: skip
        text = "\n".join(line.plain.rstrip() for line in lines[:-1]).rstrip()
        print(f"{text}\n" if number < len(runs) - 1 else text)


def _draw(watching: Any) -> int:
    from rich.live import Live

    from oomrun.cli.glyphs import ASCII, UNICODE
    from oomrun.cli.keys import Keys
    from oomrun.cli.live import TerminalConsole, is_unicode, terminal_size

    glyphs = UNICODE if is_unicode(sys.stdout) else ASCII
    columns, rows = terminal_size(sys.stdout)
    console = TerminalConsole(
        file=sys.stdout, width=columns, height=rows, highlight=False
    )
    live = Live(
        console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
    )
    try:
        with Keys() as keys, live:
            _keep_drawing(watching, keys, live, glyphs)
    except OSError:
        # The terminal was closed: there is nobody left to show anything to.
        return 0
    return 0


def _keep_drawing(watching: Any, keys: Any, live: Any, glyphs: Any) -> None:
    """Until somebody presses `q`, or the terminal has gone."""
    from rich.console import Group

    from oomrun.cli.live import terminal_size
    from oomrun.cli.overview import Shown, picture

    shown, console = Shown(), live.console
    while True:
        columns, rows = terminal_size(sys.stdout)
        console.size = type(console.size)(columns, rows)
        lines = picture(
            watching.runs, shown, width=columns, height=rows, now=time.time(),
            glyphs=glyphs,
        )  # fmt: skip
        live.update(Group(*lines), refresh=True)
        try:
            pressed = keys.pressed(_EVERY_S)
        except EOFError:
            return
        for key in pressed:
            if not shown.press(key, len(watching.runs)):
                return
        if not pressed:
            watching.look()
