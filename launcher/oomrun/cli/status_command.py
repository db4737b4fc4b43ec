"""``oomrun status RUN_DIR``: how a run stands, from its journal.

Covers: finding the run, whether it is being run at this moment, printing. Does not
cover: what the state says (``core.status``).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomrun import journal
from oomrun.cli.kubernetes_commands import add_mode_option
from oomrun.core import levers, units, words
from oomrun.core import status as statuses
from oomrun.core.errors import JournalError
from oomrun.core.state import JobState, replay
from oomrun.rundir import RunDir

__all__ = ["add_parser", "find_run", "not_a_run", "status", "supervisor_alive"]


def add_parser(subparsers: Any) -> None:
    """Adds ``status`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status", help="show how a run stands", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="the run's folder, or its name under runs/",
    )
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="RUN_DIR is a job file: show how the job stands on its cluster",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="of the kubeconfig, with --kubernetes; default: the current one",
    )
    add_mode_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=status)


def status(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if args.kubernetes:
        from oomrun.cli.cluster_commands import show_status

        args.job, args.set = args.run_dir, args.set or []
        return show_status(args)
    run_dir = find_run(Path(args.run_dir))
    if run_dir is None:
        print(f"oomrun: {not_a_run(Path(args.run_dir))}", file=sys.stderr)
        return 2
    try:
        state = replay(journal.read(run_dir.journal))
    except JournalError as error:
        print(f"oomrun: {error}", file=sys.stderr)
        return error.exit_code
    alive = supervisor_alive(run_dir)
    if args.json:
        body = {**statuses.status_json(state), "supervisor_alive": alive}
        print(json.dumps(body, indent=2))
        return 0
    for line in _lines(state, alive, run_dir):
        print(line)
    return 0


def find_run(path: Path) -> RunDir | None:
    """The run in that folder, or of that name under ``runs/``."""
    for candidate in (RunDir(path), RunDir(Path("runs") / path)):
        if candidate.journal.is_file():
            return candidate
    return None


def not_a_run(path: Path) -> str:
    """What is wrong with a path at which there is no run."""
    if path.is_dir():
        return f"{path} is no run directory: it holds no journal"
    if path.exists():
        return f"{path} is no run directory"
    known = sorted(str(found.parent) for found in Path("runs").glob("*/journal.jsonl"))
    hint = f" (there are {', '.join(known[:10])})" if known else ""
    return f"{path}: there is no such run{hint}"


def supervisor_alive(run_dir: RunDir) -> bool:
    """Whether a supervisor holds the run's lock at this moment."""
    try:
        descriptor = os.open(run_dir.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _holder_exists(os.pread(descriptor, 32, 0)):
            return False
        # The number may be another process's by now: the lock itself decides. It is
        # not asked first, since a supervisor that starts in that moment would be
        # refused by our asking.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _holder_exists(content: bytes) -> bool:
    with contextlib.suppress(ValueError, ProcessLookupError, OverflowError):
        pid = int(content)
        with contextlib.suppress(PermissionError):  # it exists, and is another user's
            os.kill(pid, 0)
        return pid > 0
    return False


def _lines(state: JobState, alive: bool, run_dir: RunDir) -> Iterator[str]:
    name = words.one_line(state.name or "(no run yet)")
    yield f"{name}: {words.one_line(statuses.standing(state, supervisor_alive=alive))}"
    if state.step or state.epoch:
        yield f"  progress     {words.progress(state)}; {state.samples} samples"
    devices = statuses.devices(state)
    whole = state.global_batch_size if len(devices) > 1 else None
    for device in devices:
        yield f"  {device.id:<12} {_device(device, whole)}"
    yield f"  memory       {_ooms(state)}"
    report = statuses.last_oom_report(state)
    if report is not None and (run_dir.path / report).is_file():
        yield f"  see          {words.one_line(str(run_dir.path / report))}"
    yield f"  attempts     {state.attempt}{_restarts(state)}"
    if state.checkpoint is not None:
        size = units.format_bytes(state.checkpoint.size_bytes)
        yield f"  checkpoint   {state.checkpoint.name}, {size}"
    mirror = statuses.status_json(state)["mirror"]
    if mirror is not None:
        failed = f", {mirror['failures']} failed" if mirror["failures"] else ""
        yield f"  copied       {mirror['name'] or 'none yet'}{failed}"
    for lever in levers.in_force(state):
        yield f"  lever        {words.one_line(levers.in_words(lever))}"
    if state.optimizer is not None:
        yield f"  optimizer    {words.one_line(words.replaced(state.optimizer))}"
    for name in statuses.left_out(state):
        yield f"  left out     {words.one_line(name)} (lever fewer_devices)"
    if state.last_decision:
        yield f"  decision     {words.one_line(state.last_decision)}"
    for note in statuses.status_json(state)["notes"]:
        yield f"  note         {words.one_line(note)}"


def _device(device: statuses.DeviceStatus, whole: int | None) -> str:
    parts = []
    if device.micro_batch_size and device.share:
        parts.append(words.cut(device.share, device.micro_batch_size, whole))
    for label, value in (
        ("peak", device.peak_bytes),
        ("predicted", device.predicted_peak_bytes),
        ("limit", device.limit_bytes),
    ):
        if value is not None:
            parts.append(f"{label} {units.format_bytes(value)}")
    return ", ".join(parts) or device.kind


def _ooms(state: JobState) -> str:
    if not state.oom_events:
        return "never ran out"
    times = "once" if state.oom_events == 1 else f"{state.oom_events} times"
    return f"ran out {times}, {state.in_process_recoveries} recovered in process"


def _restarts(state: JobState) -> str:
    causes = [f"{count} by {cause}" for cause, count in state.restarts.items() if count]
    return f" (restarts: {', '.join(causes)})" if causes else ""
