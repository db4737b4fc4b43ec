"""What an attempt needs before its worker starts: the launch, its files, the process.

Covers: from a spec and a plan to a started worker. Does not cover: watching it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oomrun.core import command, levers, planning, remote
from oomrun.core import launch as launches
from oomrun.core import plan as plans
from oomrun.core.errors import LaunchError
from oomrun.core.launch import RANK, Launch
from oomrun.core.plan import Plan
from oomrun.core.policy import Limits
from oomrun.core.spec import (
    AtMost,
    Command,
    EverySeconds,
    EverySteps,
    JobSpec,
    Module,
    Script,
)
from oomrun.core.state import JobState
from oomrun.core.topology import Inventory
from oomrun.environment import (
    command_environment,
    source_roots,
    worker_environment,
)
from oomrun.gang import Gang
from oomrun.processes import Worker
from oomrun.ranks import Rendezvous, of_host
from oomrun.remembering import environment_of
from oomrun.rundir import RunDir, write_atomically
from oomrun.watched import Timing, Watched

__all__ = [
    "WORKER_ARGV",
    "Job",
    "checkpoint_dir",
    "end",
    "make_launch",
    "policy_limits",
    "start_told",
    "start_workers",
]

# Not `-m oomrun.worker`: that would put the calling folder first on sys.path, where a
# json.py of the user's would be taken for Python's own. The script sets it up itself.
WORKER_ARGV = (
    sys.executable,
    "-c",
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; "
    "from oomrun.worker.bootstrap import main; sys.exit(main())",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to be run, and how.

    Attributes:
        spec: what the user wrote.
        job_file: where; paths in it are relative to its folder.
        job_text: the file's content, kept with the run.
        run_dir: the run's folder.
        cwd: the folder that the script runs in.
        environment: our own, which the worker's is made from.
        fresh: set an earlier run in the folder aside and start over.
        allow_changes: go on although the mathematics changed.
        measure: train nothing; see ``measuring``.
        worker_argv: the worker program; tests put their own here.
        timing: how long to wait for what.
        owns_process: all children of this process are the run's.
    """

    spec: JobSpec
    job_file: Path
    job_text: bytes
    run_dir: RunDir
    cwd: Path
    environment: Mapping[str, str]
    fresh: bool = False
    allow_changes: bool = False
    measure: bool = False
    worker_argv: tuple[str, ...] = WORKER_ARGV
    timing: Timing = field(default_factory=Timing)
    owns_process: bool = False


def policy_limits(spec: JobSpec) -> Limits:
    """What the job file lets the policy do."""
    allowed = spec.recovery.max_restarts
    return Limits(
        max_restarts={
            "oom": allowed.oom,
            "crash": allowed.crash,
            "preemption": allowed.preemption,
            "hang": allowed.hang,
        },
        levers=spec.recovery.left,
        micro_batch_fixed=isinstance(spec.batch.micro, int),
        command=isinstance(spec.program, Command),
    )


def make_launch(
    job: Job,
    plan: Plan,
    state: JobState,
    attempt: int,
    environment: Mapping[str, Any] | None = None,
    rank: int = 0,
) -> Launch:
    """What a worker of attempt ``attempt`` is told.

    Args:
        job: what is run.
        plan: of this worker's device.
        state: the run so far.
        attempt: its number.
        environment: see ``Launch``.
        rank: which of the attempt's workers it is.
    """
    spec = job.spec
    kind, program, args = _program(job, plan)
    micro, every = spec.batch.micro, spec.checkpoint.every
    order = spec.recovery.left
    shrinks = levers.MICRO_BATCH in order and not isinstance(micro, int)
    # What the job file lists before the micro-batch comes before it.
    shrinks = shrinks and levers.due(order, state, plans.to_json(plan)) is None
    others = rank > 0 or len(plan.devices) > 1
    return Launch(
        attempt=attempt,
        rank=rank,
        plan=plan,
        program_kind=kind,
        program=program,
        args=args,
        run_id=state.run_id,
        seed=state.seed,
        checkpoint_dir=str(checkpoint_dir(job)),
        checkpoint_every_steps=every.steps if isinstance(every, EverySteps) else None,
        checkpoint_every_s=every.seconds if isinstance(every, EverySeconds) else None,
        keep=spec.checkpoint.keep,
        checkpoint_timeout_s=spec.checkpoint.timeout_s,
        checkpoint_url=spec.checkpoint.url,
        job=remote.digests(state.mathematics) if spec.checkpoint.url else {},
        in_process=spec.recovery.in_process == "auto" and shrinks,
        micro_batch_max=micro.size if isinstance(micro, AtMost) else None,
        micro_batch_fixed=micro if isinstance(micro, int) else None,
        global_batch_size=spec.batch.global_size,
        last_step=state.reached_step,
        batch_norm=spec.batch.batch_norm,
        grow_back=spec.recovery.grow_back,
        shares=spec.batch.shares,
        probe=spec.memory.probe == "auto" and shrinks,
        measure=job.measure,
        measured={} if others else state.measured,
        recorded={} if others else state.recorded,
        micro_batch_failed=state.failed_by_rank.get(rank)
        if rank
        else planning.known_to_fail(state, plan.devices[0].limit_bytes),
        environment=environment,
        fit=state.fit,
        profile_key=state.profile_key,
        supervisor_pid=os.getpid(),
    )


def _program(job: Job, plan: Plan) -> tuple[str, str, tuple[str, ...]]:
    match job.spec.program:
        case Script(path=path, args=args):
            return "script", str((job.job_file.parent / path).absolute()), args
        case Module(name=name, args=args):
            return "module", name, args
        case Command(argv=argv):
            known = command.values(plan)
            program, *words = [command.fill(word, known) for word in argv]
            if "/" in program:
                program = str((job.job_file.parent / program).absolute())
            return "command", program, tuple(words)


def checkpoint_dir(job: Job) -> Path:
    """Where the job's checkpoints are: by default in the run directory.

    A URL holds copies of those.
    """
    named = job.spec.checkpoint.directory
    if named is None or job.spec.checkpoint.url is not None:
        return job.run_dir.checkpoints.absolute()
    return (job.job_file.parent / named).absolute()


def start_workers(
    job: Job,
    plan: Plan,
    state: JobState,
    attempt: int,
    inventory: Inventory,
    rendezvous: Rendezvous | None = None,
    gang: Gang | None = None,
) -> list[Watched]:
    """Writes the attempt's files and starts its workers.

    Args:
        job: what is run.
        plan: of the attempt.
        state: the run so far.
        attempt: its number.
        inventory: the machine that it was planned for.
        rendezvous: where the workers meet: one is started for each device. None: one
            worker has all devices.
        gang: the hosts of the plan's devices, where they are several.

    Returns:
        The workers, in the order of their ranks.

    Raises:
        PlatformError: a file cannot be written or a worker not be started.
    """
    folder = job.run_dir.attempt(attempt)
    write_atomically(folder.plan, _json(plans.to_json(plan)))
    if isinstance(job.spec.program, Command):
        launch = make_launch(job, plan, state, attempt)
        write_atomically(folder.launch(), _json(launches.to_json(launch)))
        return [_start_command(job, launch)]
    if rendezvous is None:
        return [_start_worker(job, plan, state, attempt, inventory)]
    workers: list[Watched] = []
    hosts = [device.host for device in plan.devices]
    places = gang.places(hosts) if gang is not None else [None] * len(hosts)
    try:
        for rank, (device, place) in enumerate(zip(plan.devices, places, strict=True)):
            own = replace(plan, devices=(device,))
            told = rendezvous.environment(plan.strategy, rank, len(hosts), place)
            if gang is not None and device.host:
                asked = launches.to_json(
                    make_launch(job, own, state, attempt, rank=rank)
                )
                workers.append(gang.start(device.host, rank, asked, told))
                continue
            if place is not None:
                told |= of_host(told, place.address)
            workers.append(
                _start_worker(job, own, state, attempt, inventory, rank, told)
            )
    except BaseException:
        end(workers)
        raise
    return workers


def end(workers: Sequence[Watched]) -> None:
    """Kills workers that have only just been started."""
    for worker in workers:
        worker.finish()
        worker.close()


def _start_worker(
    job: Job,
    plan: Plan,
    state: JobState,
    attempt: int,
    inventory: Inventory,
    rank: int = 0,
    told: Mapping[str, str] | None = None,
) -> Worker:
    launch = make_launch(job, plan, state, attempt, rank=rank)
    replicas = len(plan.devices) if told is None else told.get("HOROVOD_SIZE")
    if replicas is not None:
        env = _environment(job, launch)
        known = environment_of(job.spec, plan, inventory, env, int(replicas))
        launch = replace(launch, environment=known)
    return start_told(job, launch, told or {})


def start_told(job: Job, launch: Launch, told: Mapping[str, str]) -> Worker:
    """Writes the launch of a worker that runs a script, and starts it on this host.

    Args:
        job: what is run.
        launch: what the worker is told.
        told: variables that say who it is in its group.

    Raises:
        PlatformError: a file cannot be written or it cannot be started.
    """
    folder, rank = job.run_dir.attempt(launch.attempt), launch.rank
    write_atomically(folder.launch(rank), _json(launches.to_json(launch)))
    return Worker(
        job.worker_argv,
        {**_environment(job, launch), **told, RANK: str(rank)},
        folder.log(rank).absolute(),
        job.cwd,
    )


def _environment(job: Job, launch: Launch) -> dict[str, str]:
    folder = job.run_dir.attempt(launch.attempt)
    return worker_environment(
        _given(job),
        dict(job.spec.env),
        launch.plan,
        run_id=launch.run_id,
        seed=launch.seed,
        launch_file=folder.launch(launch.rank).absolute(),
        roots=source_roots(),
    )


def _start_command(job: Job, launch: Launch) -> Worker:
    folder, plan = job.run_dir.attempt(launch.attempt), launch.plan
    try:
        # It may keep its own checkpoints there, and must find the folder to do so.
        os.makedirs(launch.checkpoint_dir, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise LaunchError(
            f"the folder for checkpoints cannot be made: {why}",
            where=launch.checkpoint_dir,
        ) from None
    known = command.values(plan)
    own = {name: command.fill(text, known) for name, text in job.spec.env}
    told = command.variables(plan, launch.attempt, launch.checkpoint_dir)
    env = command_environment(
        _given(job),
        {**own, **told},
        plan,
        run_id=launch.run_id,
        launch_file=folder.launch().absolute(),
    )
    return Worker(_guard_argv(), env, folder.log().absolute(), job.cwd)


def _given(job: Job) -> dict[str, str]:
    """Our environment, less the secrets that are for the metrics alone."""
    hidden = job.spec.metrics.secret_variables
    return {key: job.environment[key] for key in job.environment if key not in hidden}


def _guard_argv() -> tuple[str, ...]:
    """The guard in an interpreter of our own.

    It is isolated, and finds its modules where we found ours: Python's variables in the
    environment are the program's, which may be another Python.
    """
    code = (
        f"import sys; sys.path[:] = {[p for p in sys.path if os.path.isabs(p)]!r}; "
        "from oomrun.guard import main; sys.exit(main())"
    )
    return (sys.executable, "-I", "-c", code)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
