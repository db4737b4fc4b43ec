"""``oomrun run`` on several hosts: its options, and the part that each host takes.

Covers: the gang that the options or the job file's hosts tell of; the last words in the
file that ``OOMRUN_TERMINATION_LOG`` names. Does not cover: what a gang does
(``oomrun.gang``, ``oomrun.member``), and ssh (``oomrun.hosts``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

from oomrun.core import last_words
from oomrun.core.errors import LaunchError, OomrunError, Problem, SpecError

__all__ = ["add", "meeting_of", "served", "supervised"]

# A gang's hosts may be waited for in a queue; those of a job file are there, or not.
_MEET_WITHIN_S, _CALLED_WITHIN_S = 1800.0, 300.0


def add(parser: argparse.ArgumentParser, duration: Callable[[str], float]) -> None:
    """Adds the options of a job on several hosts; ``duration`` reads a time."""
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
        type=duration,
        metavar="TIME",
        help="how long one waits for the others (default: 30min; 5min for the job "
        "file's hosts)",
    )


def meeting_of(args: argparse.Namespace, job: Any) -> tuple[Any, tuple[str, ...]]:
    """The gang, or None, and the hosts of it that are to be called by us."""
    if args.gang == 1 and job.spec.hosts is not None:
        return _meeting_of_hosts(job, args.meet_within)
    return _meeting(args), ()


def _meeting(args: argparse.Namespace) -> Any:
    """The gang that the options tell of, or None."""
    if args.gang == 1:
        return None
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
        patience_s=args.meet_within or _MEET_WITHIN_S,
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


def _meeting_of_hosts(job: Any, within_s: float | None) -> tuple[Any, tuple[str, ...]]:
    """The gang that the job file's hosts are, and those of them that are called."""
    from oomrun import hosts
    from oomrun.gang import Meeting

    known = hosts.of_job(job.spec.hosts, job.job_file, job.environment)
    called = tuple(name for name, address in known.items() if address)
    if len(called) == len(known):
        raise LaunchError(
            "oomrun is called on one of a job's hosts, which has the run: this one is "
            "not among them",
            where=", ".join(known),
        )
    if not called:
        return None, ()
    ours = hosts.address_towards(known[called[0]])
    if job.spec.strategy != "multi_worker_mirrored":
        hosts.check_own_name(ours)
    meeting = Meeting(
        size=len(known),
        member=0,
        host=ours,
        port=0,
        patience_s=within_s or _CALLED_WITHIN_S,
    )
    return meeting, called


def supervised(
    job: Any, meeting: Any, called: Any, args: Any, *, stops: Any, **more: Any
) -> Any:
    """The run, with the other hosts of its gang if there are any."""
    from oomrun.gang import Gang
    from oomrun.supervisor import supervise

    with contextlib.ExitStack() as stack:
        gang = None
        if meeting is not None:
            gang = Gang(meeting, job.job_text, stops, job.run_dir.key)
            if called:
                calls = _call(called, job, meeting, gang.port, args)
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


def _call(called: Any, job: Any, meeting: Any, port: int, args: Any) -> Any:
    """Starts members on the job file's other hosts."""
    from oomrun import hosts

    settings = [word for change in args.set or () for word in ("--set", change)]
    words = [
        [
            "run", str(job.job_file), *settings,
            "--run-dir", str(job.run_dir.path), "--gang", str(meeting.size),
            "--member", str(number), "--meet", f"{meeting.host}:{port}",
        ]
        for number in range(1, meeting.size)
    ]  # fmt: skip
    return hosts.Calls(called, words, job.cwd, job.environment)


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
