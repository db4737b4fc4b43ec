"""Measuring what a job needs without training it: ``oomrun plan --measure``.

Covers: starting the job's worker as a run would, in a folder of its own that is gone
afterwards, and what came of it. Does not cover: what the worker does
(``worker/measuring.py``), the plan that follows (``core/measured_plan.py``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oomrun.core import events as ev
from oomrun.core.spec import AUTO, Cpus, JobSpec
from oomrun.core.state import JobState
from oomrun.core.topology import Inventory
from oomrun.launching import Job
from oomrun.rundir import RunDir
from oomrun.stops import Stops
from oomrun.supervisor import supervise
from oomrun.watched import Timing

__all__ = ["Measured", "measure", "without_device"]

_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of measuring a job.

    Attributes:
        state: of the run that trained nothing.
        tried: the sizes that were tried, in this order.
        planned: the one to train with; None where the script has come to no ``fit``
            that could be measured.
        exit_code: as a run's.
        reason: how the script ended, or what a run would say of it.
        last_lines: of what the script printed.
    """

    state: JobState
    tried: tuple[ev.Probed, ...]
    planned: ev.MicroBatchPlanned | None
    exit_code: int
    reason: str
    last_lines: tuple[str, ...]


def without_device(spec: JobSpec) -> JobSpec:
    """The job on the CPU without a limit, where the step's graph can be had."""
    memory = replace(spec.memory, limit=AUTO, mode="growth")
    return replace(spec, devices=Cpus(), memory=memory)


def measure(
    spec: JobSpec,
    job_file: Path,
    environment: Mapping[str, str],
    *,
    inventory: Inventory,
    stops: Stops,
    tell: Callable[[JobState, ev.Event], None],
) -> Measured:
    """Runs the script up to its first step, and measures there what it needs.

    What is measured is remembered for the job's runs, as what they measure is. Nothing
    else stays: the job's own run directory and checkpoints are not looked at.

    Args:
        spec: what the user wrote.
        job_file: where.
        environment: our own.
        inventory: the machine.
        stops: requests to stop; whoever calls installs the handlers.
        tell: called after each event, with the state after it.

    Raises:
        InfeasiblePlanError: nothing fits, as can be seen before.
        PlatformError: the worker cannot be started.
    """
    seen: list[ev.Event] = []

    def observe(state: JobState, event: ev.Event) -> None:
        seen.append(event)
        tell(state, event)

    with tempfile.TemporaryDirectory(
        prefix="oomrun-plan-", ignore_cleanup_errors=True
    ) as folder:
        job = Job(
            spec=_once(spec),
            job_file=job_file,
            job_text=job_file.read_bytes(),
            run_dir=RunDir(Path(folder, "run")),
            cwd=Path.cwd(),
            environment=environment,
            measure=True,
            # There is nothing to save.
            timing=Timing(grace_s=0.0),
            owns_process=True,
        )
        outcome = supervise(
            job, stops=stops, observers=(observe,), inventory=lambda: inventory
        )
        log = job.run_dir.attempt(outcome.state.attempt).log()
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    planned = [event for event in seen if isinstance(event, ev.MicroBatchPlanned)]
    ends = [event.summary for event in seen if isinstance(event, ev.AttemptEnded)]
    return Measured(
        state=outcome.state,
        tried=tuple(event for event in seen if isinstance(event, ev.Probed)),
        planned=planned[-1] if planned else None,
        exit_code=outcome.exit_code,
        # What follows from an end is a run's: there is no other attempt after a crash.
        reason=ends[-1] if outcome.exit_code == 1 and ends else outcome.reason,
        last_lines=tuple(lines[-_LINES:]),
    )


def _once(spec: JobSpec) -> JobSpec:
    """The job in our own folder, and not again if it fails but by running out."""
    allowed = replace(spec.recovery.max_restarts, crash=0, preemption=0, hang=0)
    return replace(
        spec,
        recovery=replace(spec.recovery, max_restarts=allowed),
        checkpoint=replace(spec.checkpoint, directory=None),
    )
