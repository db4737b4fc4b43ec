"""``oomrun run JOB``: joins the supervisor, the view, the metrics and the signals.

Covers: options, and what is said at the end. Does not cover: running anything itself.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from oomrun.cli import gang_options, option_values
from oomrun.cli.jobfile_commands import add_set_option, load_job_file
from oomrun.core import units
from oomrun.core.errors import Problem, SpecError
from oomrun.core.spec import JobSpec
from oomrun.core.state import JobState
from oomrun.core.status import shows_steps

__all__ = ["add_parser", "add_run_dir_option", "duration", "run", "run_dir_of"]

_LAST_SCRAPE_S = 30.0
_VIEWS = ("auto", "live", "plain")


def add_parser(subparsers: Any) -> None:
    """Adds ``run`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="train",
        usage="oomrun [run] JOB [options]",
        description="Train. An unfinished run of the job goes on where it was; a "
        "finished one is left alone.",
    )
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(parser)
    add_run_dir_option(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="set an earlier run aside and start over"
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="go on with a run although the script, its arguments, its environment or "
        "the global batch changed: another model may come out",
    )
    parser.add_argument(
        "--grace",
        type=duration,
        default=30.0,
        metavar="TIME",
        help="how long a checkpoint may take when oomrun is stopped (default: 30s)",
    )
    parser.add_argument(
        "--view", choices=_VIEWS, default="auto", help="default: live on a terminal"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: one JSON object a line instead of a view",
    )
    gang_options.add(parser, duration)
    parser.set_defaults(handler=run)


def add_run_dir_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--run-dir`` of the commands that look at a job's run."""
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="where the run is kept (default: runs/NAME)",
    )


def run_dir_of(args: argparse.Namespace, spec: JobSpec) -> Path:
    """The run directory that the command line or the job's name tells.

    Raises:
        SpecError: it is somebody's folder already, and holds no run.
    """
    named: Path | None = args.run_dir
    folder = named if named is not None else Path("runs") / spec.name
    # A run's files, job.yaml among them, must never lie among (or over) others.
    if folder.is_dir() and not _is_for_runs(folder):
        raise SpecError(
            [
                Problem(
                    file="runs/NAME" if named is None else "--run-dir",
                    line=1,
                    column=1,
                    path="",
                    message=f"{folder} is not empty and holds no run",
                    hint="name a folder of the run's own",
                )
            ]
        )
    return folder


def _is_for_runs(folder: Path) -> bool:
    names = {entry.name for entry in folder.iterdir()}
    return "journal.jsonl" in names or names <= {"lock"}


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns the exit code."""
    # Only here: `oomrun run --help` needs none of it.
    from oomrun.cli.view import make_observer
    from oomrun.launching import Job
    from oomrun.processes import become_subreaper
    from oomrun.rundir import RunDir
    from oomrun.stops import Stops
    from oomrun.watched import Timing

    logging.basicConfig(format="oomrun: %(message)s", level=logging.WARNING)
    spec = load_job_file(args.job, args.set)
    job = Job(
        spec=spec,
        job_file=Path(args.job),
        job_text=Path(args.job).read_bytes(),
        run_dir=RunDir(run_dir_of(args, spec)),
        cwd=Path.cwd(),
        environment=os.environ,
        fresh=args.fresh,
        allow_changes=args.allow_changes,
        timing=Timing(grace_s=args.grace, hang_after=spec.recovery.hang_after),
        owns_process=True,
    )
    become_subreaper()
    meeting, called = gang_options.meeting_of(args, job)
    if meeting is not None and meeting.member:
        return gang_options.served(job, meeting)
    latest = _Latest()
    metrics = spec.metrics
    form = "json" if args.log_format == "json" else args.view
    with contextlib.ExitStack() as stack:
        stops = Stops()
        stack.callback(stops.close)
        stack.enter_context(stops.installed())
        machine = _machine(job)
        if machine is not None:
            stack.enter_context(machine)
        exporter = _exporter(job, latest, machine)
        if exporter is not None:
            stack.callback(exporter.close)
        if metrics.textfile is not None:
            stack.enter_context(_textfile(job, latest, machine))
        with make_observer(sys.stdout, force=form) as view:
            outcome = gang_options.supervised(
                job,
                meeting,
                called,
                args,
                stops=stops,
                observers=(view,),
                on_journaled=latest,
            )
        if metrics.pushgateway is not None and not outcome.already:
            _push(metrics.pushgateway, latest)
        if exporter is not None and not outcome.already:
            _last_scrape(exporter, stops)
    _say_end(outcome, job, sys.stderr)
    code: int = outcome.exit_code
    return code


class _Latest:
    """Knows the journaled state at any moment, for the metrics' threads."""

    def __init__(self) -> None:
        self.state = JobState()

    def __call__(self, state: JobState) -> None:
        self.state = state


def _machine(job: Any) -> Any:
    """What reads the machine for those who watch; None where nobody can."""
    if job.spec.metrics.listen is None and job.spec.metrics.textfile is None:
        return None
    from oomrun.devices.sampling import Sampling

    return Sampling()


def _textfile(job: Any, latest: _Latest, machine: Any) -> Any:
    from oomrun.metrics.handing_over import Textfile

    path = job.job_file.parent / job.spec.metrics.textfile
    return Textfile(path, lambda: latest.state, machine)


def _push(url: str, latest: _Latest) -> None:
    from oomrun.metrics.handing_over import push

    push(url, latest.state)


def _exporter(job: Any, latest: _Latest, machine: Any) -> Any:
    """The metrics endpoint, or None where it is not wanted or cannot be had.

    Raises:
        ProtectionError: a secret or a certificate cannot be had. Unlike a port, it
            will not be there later, and nobody would see that it is missing.
        ExporterError: the address cannot be had, and the job file wants no other.
    """
    listen = job.spec.metrics.listen
    if listen is None:
        return None
    from oomrun.metrics import exporter
    from oomrun.metrics.protection import protection

    who = protection(
        job.spec.metrics, folder=job.job_file.parent, environment=os.environ
    )
    try:
        started = exporter.start(
            listen.host,
            listen.port,
            lambda: latest.state,
            machine=machine,
            port_taken=job.spec.metrics.port_taken,
            protection=who,
        )
    except exporter.ExporterError as error:
        if job.spec.metrics.port_taken == "error":
            raise
        print(f"oomrun: {error}; the run goes on without", file=sys.stderr)
        return None
    if started.note:
        print(f"oomrun: {started.note}", file=sys.stderr)
    return started


def _last_scrape(exporter: Any, stops: Any) -> None:
    """Stays until the end of the run was scraped, unless we are in a hurry."""
    waiting = threading.Thread(
        target=exporter.linger, args=(_LAST_SCRAPE_S,), daemon=True
    )
    waiting.start()
    while waiting.is_alive() and not stops.requested:
        waiting.join(0.1)


def _say_end(outcome: Any, job: Any, stream: Any) -> None:
    """What the view has not said: how to go on, where to look."""
    state = outcome.state
    if outcome.already:
        print(
            f"oomrun: {job.run_dir.path}: {outcome.reason} (--fresh starts over)",
            file=stream,
        )
    elif state.state == "preempted":
        where = f" at step {state.step}" if shows_steps(state) else ""
        print(f"oomrun: stopped{where}; the same command goes on", file=stream)
    elif outcome.exit_code != 0:
        log = job.run_dir.attempt(state.attempt).log(state.failed_rank)
        print(f"oomrun: {outcome.reason}; its output is in {log}", file=stream)


def duration(text: str) -> float:
    """A time such as 30s as an option's value, in seconds."""
    return option_values.read(text, units.parse_duration, "time such as 30s or 2min")
