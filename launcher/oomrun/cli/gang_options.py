"""``oomrun run`` as one of several hosts, and what it says at its end.

Covers: the options of a gang, its two parts, the last words in the file that
``OOMRUN_TERMINATION_LOG`` names. Does not cover: what either part does (``gang``,
``member``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from oomrun.cli import called_hosts
from oomrun.core import last_words
from oomrun.core.errors import OomrunError, Problem, SpecError
from oomrun.core.units import parse_duration

__all__ = ["add", "meeting", "served", "supervised"]

_PATIENCE_S = 1800.0


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a gang to ``run``."""
    gang = parser.add_argument_group(
        "several hosts",
        "The same command on each host, in a folder that all of them share. Member 0 "
        "has the run; the others start workers for it.",
    )
    gang.add_argument(
        "--gang", type=int, default=1, metavar="N", help="how many hosts there are"
    )
    gang.add_argument(
        "--member",
        type=_sum,
        default=0,
        metavar="I",
        help="which of them this is, from 0; a sum such as 1+0 is taken, too",
    )
    gang.add_argument(
        "--meet",
        type=_address,
        metavar="HOST:PORT",
        help="where member 0 listens, as the others call it",
    )
    gang.add_argument(
        "--meet-within",
        type=_patience,
        metavar="TIME",
        help="how long one waits for the others (default: 30min; 5min for the job "
        "file's hosts)",
    )


def meeting(args: argparse.Namespace, job: Any) -> tuple[Any, tuple[str, ...]]:
    """The gang that options or job file tell of, or None, and whom of it we call."""
    if args.gang > 1:
        return _meeting(args), ()
    if job.spec.hosts is None:
        return None, ()
    return called_hosts.meeting_of(job, args.meet_within)


def _meeting(args: argparse.Namespace) -> Any:
    from oomrun.gang import Meeting

    wrong = ""
    if args.meet is None:
        wrong = "--gang needs --meet HOST:PORT"
    elif not 0 <= args.member < args.gang:
        wrong = f"--member must be 0 to {args.gang - 1}, with --gang {args.gang}"
    if wrong:
        problem = Problem(file="oomrun run", line=1, column=1, path="", message=wrong)
        raise SpecError([problem])
    address, port = args.meet
    return Meeting(
        size=args.gang,
        member=args.member,
        host=address,
        port=port,
        patience_s=args.meet_within or _PATIENCE_S,
    )


def served(job: Any, meeting: Any) -> int:
    """The part of a member that has not the run."""
    from oomrun.member import serve
    from oomrun.stops import Stops

    with contextlib.closing(Stops()) as stops, stops.installed():
        try:
            return serve(job, meeting, stops=stops)
        except OomrunError as error:
            _say_last(last_words.of_error(error.exit_code, str(error)))
            raise


def supervised(
    job: Any, meeting: Any, called: Any, args: Any, *, stops: Any, **more: Any
) -> Any:
    """The run, with the other hosts of its gang if there are any."""
    from oomrun.gang import Gang
    from oomrun.supervisor import supervise

    with contextlib.ExitStack() as stack:
        gang = None
        if meeting is not None:
            gang = Gang(meeting, job.job_text, stops)
            if called:
                # Closed after the gang, whose members then leave by themselves.
                calls = called_hosts.call(called, job, meeting, gang.port, args)
                stack.callback(calls.close)
            stack.callback(gang.close)
        try:
            outcome = supervise(job, stops=stops, gang=gang, **more)
        except OomrunError as error:
            if gang is not None:
                gang.dismiss(error.exit_code)
            _say_last(last_words.of_error(error.exit_code, str(error)))
            raise
        if gang is not None:
            gang.dismiss(outcome.exit_code)
    code, state = outcome.exit_code, outcome.state
    _say_last(last_words.of_state(state, code, outcome.reason))
    return outcome


def _say_last(words: str) -> None:
    """To a container's termination message, for one; nobody need listen."""
    path = os.environ.get(last_words.VARIABLE)
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(words)


def _patience(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 30min") from None


def _sum(text: str) -> int:
    parts = text.split("+")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return sum(map(int, parts))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as host-0:18999")
    return host.strip("[]"), int(port)
