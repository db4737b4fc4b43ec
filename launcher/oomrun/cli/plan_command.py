"""``oomrun plan JOB``: what would be run, and why. Trains nothing.

Covers: making the plan that ``run`` would make now, and printing it. Does not cover:
how it is made (``core.planning``).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oomrun.cli.jobfile_commands import add_set_option, load_job_file
from oomrun.cli.run_command import add_run_dir_option, run_dir_of
from oomrun.core import plan as plans
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.spec import Command, JobSpec, mathematics
from oomrun.core.state import JobState, replay
from oomrun.core.units import format_bytes

__all__ = ["add_parser", "plan"]

_HEAD = (
    "device", "limit", "budget", "share", "micro-batch", "passes", "predicted peak",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Adds ``plan`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="show what would be run, and why",
        description="Show the devices, strategy, shares, micro-batches and predicted "
        "peaks of the next attempt, from the job file, the machine as it is now and "
        "what an earlier run of the job has measured. Trains nothing.",
        epilog="Exit code: 0, or 3 if nothing fits.",
    )
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(parser)
    add_run_dir_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=plan)


def plan(args: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        InfeasiblePlanError: nothing fits.
    """
    from oomrun import devices
    from oomrun.core import planning

    spec = load_job_file(args.job, args.set)
    state = _known(spec, run_dir_of(args, spec))
    environment = {**os.environ, **dict(spec.env)}
    made = planning.make_plan(spec, devices.discover(environment), state)
    if args.json:
        print(json.dumps({"name": spec.name, **plans.to_json(made)}, indent=2))
        return 0
    for line in _lines(spec, state, made):
        print(line)
    return 0


def _known(spec: JobSpec, folder: Path) -> JobState:
    """What a run of the very same job knows already."""
    from oomrun import journal
    from oomrun.rundir import RunDir

    state = replay(journal.read(RunDir(folder).journal))
    return state if state.mathematics == mathematics(spec) else JobState()


def _lines(spec: JobSpec, state: JobState, made: Plan) -> Iterator[str]:
    source = "the job file" if spec.batch.global_size else "the script, as it ran"
    size = made.global_batch_size
    unknown = "the script's, not known yet"
    if isinstance(spec.program, Command):
        unknown = "the program's own, not known"
    batch = f"{size} (from {source})" if size else unknown
    yield spec.name
    yield f"  strategy      {made.strategy} ({made.strategy_reason})"
    yield f"  global batch  {batch}"
    yield f"  memory mode   {made.memory_mode}"
    if state.attempt:
        yield f"  known from    {state.attempt} attempt(s), {state.oom_events} OOM"
    yield ""
    yield from _table([_HEAD, *map(_row, made.devices)])
    if made.notes:
        yield ""
    for note in made.notes:
        yield f"  note: {note}"


def _row(device: DevicePlan) -> tuple[str, ...]:
    return (
        device.id,
        _size(device.limit_bytes),
        _size(device.budget_bytes),
        _count(device.share),
        _count(device.micro_batch_size),
        _count(device.accumulation_steps),
        _peak(device),
    )


def _peak(device: DevicePlan) -> str:
    if device.predicted_peak_bytes is None:
        return "-"
    likely = format_bytes(device.predicted_peak_bytes)
    return f"{likely} (up to {_size(device.predicted_peak_high_bytes)})"


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()
