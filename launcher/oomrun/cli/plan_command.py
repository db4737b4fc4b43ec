"""``oomrun plan JOB``: what would be run, and why. Trains nothing.

Covers: making the plan that ``run`` would make now, with ``--measure`` from what the
job's own first step needs, and printing it. Does not cover: how it is made
(``core.planning``, ``core.measured_plan``), how it looks (``plan_view``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomrun.cli import option_values
from oomrun.cli.jobfile_commands import add_set_option, load_job_file
from oomrun.cli.plan_view import Shown, lines, to_json
from oomrun.cli.run_command import add_run_dir_option, run_dir_of
from oomrun.core import units, words
from oomrun.core.spec import Command, JobSpec, mathematics
from oomrun.core.state import JobState, replay

if TYPE_CHECKING:
    from oomrun.core.topology import Inventory
    from oomrun.measuring import Measured

__all__ = ["add_parser", "known_state", "plan"]

_EXIT_WRONG = 2
_WIDEST = 200  # of a line of the script's output


def add_parser(subparsers: Any) -> None:
    """Adds ``plan`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="show what would be run, and why",
        description="Show the devices, strategy, shares, micro-batches and predicted "
        "peaks of the next attempt, from the job file, the machine as it is now and "
        "what an earlier run of the job has measured. Trains nothing. With --measure "
        "the script itself is run up to the first batch of its first fit, as a run "
        "would: all that it does before that, it does.",
        epilog="Exit code: 0; 3 if nothing fits; with --measure 1 if the script fails "
        "before its first batch.",
    )
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(parser)
    add_run_dir_option(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the script up to its first batch, try there which micro-batch fits, "
        "show what its memory is used for, and stop: no step is trained, callbacks of "
        "fit are not called, no checkpoint is written, the job's run is not touched. "
        "A run remembers what was measured",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_size,
        help="plan for one GPU with so much memory free, such as 24GiB, which need not "
        "be here: from the graph of the job's step alone (with --measure)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=plan)


def plan(args: argparse.Namespace) -> int:
    """Prints the plan.

    Raises:
        InfeasiblePlanError: nothing fits.
    """
    from oomrun import devices

    spec = load_job_file(args.job, args.set)
    state = known_state(spec, run_dir_of(args, spec))
    if args.device_memory is not None and not _can_be_elsewhere(args, spec, state):
        return _EXIT_WRONG
    environment = {**os.environ, **dict(spec.env)}
    inventory = devices.discover(environment)
    measured = None
    if args.measure and not isinstance(spec.program, Command):
        measured = _measure(args, spec, inventory)
        if measured.exit_code != 0:
            _say_failure(measured, spec, args.device_memory)
            return measured.exit_code
    shown = _shown(args, spec, inventory, state, measured, environment)
    if args.json:
        print(json.dumps(to_json(spec, shown), indent=2))
        return 0
    for line in lines(spec, shown):
        print(line)
    return 0


def _size(text: str) -> int:
    size = option_values.read(text, units.parse_bytes, "size such as 24GiB")
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory at all")
    return size


def known_state(spec: JobSpec, folder: Path) -> JobState:
    """What a run of the very same job knows already."""
    from oomrun import journal
    from oomrun.rundir import RunDir

    state = replay(journal.read(RunDir(folder).journal))
    return state if state.mathematics == mathematics(spec) else JobState()


def _can_be_elsewhere(args: argparse.Namespace, spec: JobSpec, state: JobState) -> bool:
    """Whether there is something to plan from; says what to do where there is not."""
    if isinstance(spec.program, Command):
        wrong = "cannot be planned for: a command's steps are not oomrun's to look at"
    elif not args.measure and (
        state.composition is None or not state.composition.graph_sizes
    ):
        wrong = (
            "needs --measure too: no earlier run of this job has told what its step "
            "needs"
        )
    else:
        return True
    print(f"oomrun: --device-memory {wrong}", file=sys.stderr)
    return False


def _measure(args: argparse.Namespace, spec: JobSpec, inventory: Inventory) -> Measured:
    """Runs the script up to its first batch, and tells on stderr what is done."""
    import contextlib
    import logging

    from oomrun import measuring
    from oomrun.core import events as ev
    from oomrun.processes import become_subreaper
    from oomrun.stops import Stops

    def tell(state: JobState, event: ev.Event) -> None:
        if isinstance(event, ev.Probed):
            print(f"oomrun: {words.describe(event, state)}", file=sys.stderr)

    logging.basicConfig(format="oomrun: %(message)s", level=logging.WARNING)
    print(
        "oomrun: the script is run up to its first batch; what it does before that, it "
        "does. Nothing is trained or saved",
        file=sys.stderr,
    )
    if args.device_memory is not None:
        spec = measuring.without_device(spec)
    become_subreaper()
    with contextlib.ExitStack() as stack:
        stops = Stops()
        stack.callback(stops.close)
        stack.enter_context(stops.installed())
        return measuring.measure(
            spec,
            Path(args.job),
            os.environ,
            inventory=inventory,
            stops=stops,
            tell=tell,
        )


def _shown(
    args: argparse.Namespace,
    spec: JobSpec,
    inventory: Inventory,
    state: JobState,
    measured: Measured | None,
    environment: Mapping[str, str],
) -> Shown:
    """The plan, with all that is known of it."""
    from oomrun.core import group_planning, measured_plan
    from oomrun.environment import horovod_installed, overruled

    notes: tuple[str, ...] = ()
    if measured is not None:
        known, source = measured.state, _source(measured)
        notes = tuple(text for _, text in known.notes)
    else:
        known = state
        runs = f"{state.attempt} attempt(s), {state.oom_events} OOM"
        source = runs if state.attempt else ""
        if args.measure:
            notes = (
                "a command cannot be measured: its steps are not oomrun's, so this is "
                "what the job file and the machine say",
            )
    if args.device_memory is not None and known.composition is not None:
        made = measured_plan.plan_elsewhere(
            spec, inventory.host, args.device_memory, known.composition
        )
        source = "the graph of the step alone"
        notes = ()  # of the training on a device that is here
    elif measured is not None and measured.planned is not None:
        made = measured_plan.measured_plan(spec, inventory, known, measured.planned)
    else:
        made = group_planning.plan_for(
            spec, inventory, state, horovod=horovod_installed()
        )
    return Shown(
        plan=replace(made, notes=(*made.notes, *notes)),
        source=source,
        composition=known.composition,
        tried=() if measured is None else measured.tried,
        overruled=overruled(environment, made),
    )


def _source(measured: Measured) -> str:
    if measured.planned is None:
        return ""
    if measured.tried:
        count = len(measured.tried)
        return (
            f"{count} size{'s' if count > 1 else ''} tried now, before the first step"
        )
    devices = (measured.state.plan or {}).get("devices", ())
    if any(device["limit_bytes"] is None for device in devices):
        return "the graph of the step alone"
    return "what an earlier run has measured of this very model"


def _say_failure(measured: Measured, spec: JobSpec, elsewhere: int | None) -> None:
    """Why nothing can be planned from what was measured, and what to do."""

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    state = measured.state
    if state.state == "preempted":
        say("oomrun: stopped; nothing was trained or saved")
        return
    say(f"oomrun: {measured.reason}")
    if measured.exit_code == 3:
        failed = [str(t.micro_batch_size) for t in measured.tried if not t.peak_bytes]
        if failed:
            say(f"  out of memory at micro-batch {', '.join(failed)}")
        seen = state.composition
        if seen is not None:
            own = seen.trained_bytes * 2 + seen.fixed_bytes + seen.optimizer_bytes
            say(
                f"  weights, gradients and optimizer slots alone take "
                f"{units.format_bytes(own)}, a batch of {seen.global_batch_size} "
                f"{units.format_bytes(seen.input_bytes)}"
            )
        for _, text in state.notes:
            say(f"  note: {text}")
        say(
            "  what would help: a higher memory.limit or a device with more memory; in "
            "the script a smaller model or input, mixed precision, an optimizer with "
            "fewer slots (docs/recipes.md)"
        )
        return
    say("oomrun: nothing was measured; the script's last lines:")
    for line in measured.last_lines:
        say(f"  | {words.one_line(line, _WIDEST)}")
