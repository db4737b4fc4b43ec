"""The supervisor: plan, attempt, diagnosis, decision, until the run has ended.

Covers: taking a run up where its journal says it is, and the loop. Does not cover: any
decision (``core.policy``, ``core.planning``), one attempt (``attempts``).

Everything it knows is in the journal before it acts on it, so that it may be killed
between any two lines, and the next call of ``supervise`` goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import oomrun
from oomrun import devices, fetching, host, host_memory, known_runs, takeover
from oomrun.attempts import watch
from oomrun.core import diagnosis, group_planning, policy
from oomrun.core import events as ev
from oomrun.core import plan as plans
from oomrun.core.diagnosis import Cause, Diagnosis, Evidence
from oomrun.core.errors import JournalError, OomrunError
from oomrun.core.plan import Plan
from oomrun.core.policy import Decision, Fail, Finish, Restart, Stop
from oomrun.core.spec import IN_WORKERS, Command, mathematics
from oomrun.core.state import JobState
from oomrun.core.topology import Inventory, Unreadable
from oomrun.environment import check_backend, horovod_installed
from oomrun.fetching import Fetched
from oomrun.gang import Gang
from oomrun.journal import Journal
from oomrun.launching import Job, checkpoint_dir, end, policy_limits, start_workers
from oomrun.logs import of_command
from oomrun.oom_reports import OomReports
from oomrun.own_events import attempt_ended, decision_made, oom_of_command
from oomrun.processes import sweep
from oomrun.profiles import Profiles, folder_of
from oomrun.ranks import Rendezvous
from oomrun.recorder import Observer, Recorder
from oomrun.remembering import Remembering
from oomrun.rundir import set_aside, write_atomically
from oomrun.stops import Stops

__all__ = ["Outcome", "supervise"]

_log = logging.getLogger(__name__)

_WAIT_SLICE_S = 0.5  # between two looks at whether we were asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, or that it had ended before.

    Attributes:
        exit_code: for the shell.
        reason: one sentence.
        state: the run.
        already: it was completed before this call, which did nothing.
    """

    exit_code: int
    reason: str
    state: JobState
    already: bool = False


def supervise(
    job: Job,
    *,
    stops: Stops,
    observers: Sequence[Observer] = (),
    on_journaled: Callable[[JobState], None] | None = None,
    inventory: Callable[[], Inventory] | None = None,
    gang: Gang | None = None,
) -> Outcome:
    """Runs the job to its end, or takes up an unfinished run of it.

    Args:
        job: the job.
        stops: requests to stop; whoever calls installs the handlers.
        observers: called after each event, with the state after it.
        on_journaled: called with the state that the journal has, as it grows.
        inventory: reads the machine; None: ``devices.discover``.
        gang: further hosts that the workers run on.

    Raises:
        SpecError: the job's mathematics differ from those of the run in its folder, or
            it is to start over, and what would be renamed is not the run's alone.
        InfeasiblePlanError: nothing fits.
        PlatformError: the run is locked by another, or its files cannot be written.
    """
    if not isinstance(job.spec.program, Command):
        check_backend(job.environment, dict(job.spec.env), str(job.job_file))
    look = inventory or (lambda: _discover(job))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_held(job))
        journal = stack.enter_context(Journal(job.run_dir.journal))
        known_runs.register(job.run_dir, known_runs.folders_of(job.environment))
        reports = OomReports(job.run_dir, journal.events)
        recorder = Recorder(
            journal,
            # First, so that a line about an exhaustion names a file that is there.
            (reports, *observers),
            on_journaled=on_journaled,
            progress_every_s=job.timing.progress_every_s,
        )
        state = recorder.state
        if state.run_id:
            takeover.check_same(job, state)
        if state.state == "completed":
            return Outcome(
                exit_code=0, reason="this run is complete", state=state, already=True
            )
        killed = host_memory.ran_out(job.run_dir.host_memory, host.read())
        stack.enter_context(host_memory.kept(job.run_dir.host_memory, host.read))
        run = _Run(job, recorder, stops, look, gang)
        if state.attempt_open:
            run.expect(_planned_bytes(state))
        try:
            fetched = fetching.fetch(job, state, stops)
            if stops.requested and not state.run_id:
                # Which run is to go on here is not known, so none has begun.
                reason = f"stopped by {stops.reason} before it began"
                return Outcome(exit_code=stops.exit_code, reason=reason, state=state)
            undecided = _begin(job, recorder, journal.events, killed, fetched)
            return run.to_the_end(undecided)
        finally:
            sweep(recorder.state.run_id, descendants=job.owns_process)


@contextlib.contextmanager
def _held(job: Job) -> Iterator[None]:
    """The run's folder, locked, and empty where the run is to start over."""
    folder = job.run_dir
    folder.create()
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        if job.fresh and folder.journal.exists():
            takeover.check_apart(job)
            _start_over(job)
            stack.enter_context(folder.locked())
        yield


def _start_over(job: Job) -> None:
    """Sets the earlier run aside, with its checkpoints wherever they are."""
    folder, checkpoints = job.run_dir, checkpoint_dir(job)
    # Whatever the old run left would go on writing into its folder.
    sweep(takeover.run_id(folder.journal))
    elsewhere = folder.path.absolute() not in checkpoints.parents
    # The folder last: killed in between, the next call with --fresh goes on here.
    for path in (*([checkpoints] if elsewhere else []), folder.path):
        if path.exists():
            _log.info("%s of the earlier run is now %s", path, set_aside(path))
    folder.create()


def _begin(
    job: Job,
    recorder: Recorder,
    events: Sequence[ev.Event],
    killed: str,
    fetched: Fetched | None,
) -> Diagnosis | None:
    """Opens the run in the journal; gives the last attempt's end if it is undecided."""
    before = recorder.state
    # A run that has begun on another machine goes on here.
    begun = fetched or Fetched()
    now = time.time
    write_atomically(job.run_dir.job_file, job.job_text)
    known = mathematics(job.spec)
    changed = before.mathematics != known
    if not before.run_id or changed or before.state == "failed":
        recorder.record(
            ev.RunStarted(
                at=now(),
                run_id=before.run_id or begun.run_id or uuid.uuid4().hex,
                name=job.spec.name,
                version=oomrun.__version__,
                seed=before.seed if before.run_id else begun.seed or _new_seed(),
                mathematics=known,
            )
        )
        _tell_fetched(job, recorder, fetched)
        sweep(recorder.state.run_id, descendants=job.owns_process)
        return None
    sweep(before.run_id, descendants=job.owns_process)
    reason = takeover.reason(before)
    recorder.record(ev.RunResumed(at=now(), pid=os.getpid(), reason=reason))
    _tell_fetched(job, recorder, fetched)
    if before.attempt_open:
        ended = takeover.end_of_lost_attempt(before, killed)
        recorder.record(attempt_ended(before.attempt, ended, Evidence()))
        return ended
    undecided = takeover.undecided(events)
    if undecided is None and before.state == "preempted":
        recorder.record(
            ev.DecisionMade(
                at=now(),
                attempt=before.attempt,
                action="restart",
                cause="preemption",
                reason=reason,
            )
        )
    return undecided


def _tell_fetched(job: Job, recorder: Recorder, fetched: Fetched | None) -> None:
    if fetched is not None:
        for event in fetching.events(job, recorder.state, fetched):
            recorder.record(event)


class _Run:
    """The loop, and what it needs at every turn."""

    def __init__(
        self,
        job: Job,
        recorder: Recorder,
        stops: Stops,
        look: Callable[[], Inventory],
        gang: Gang | None = None,
    ) -> None:
        self._job = job
        self._recorder = recorder
        self._stops = stops
        self._look = look
        self._gang = gang
        self._limits = policy_limits(job.spec)
        self._remembering = Remembering(Profiles(folder_of(job.environment)))
        self._free_before: dict[str, int] = {}

    def expect(self, free_bytes: Mapping[str, int]) -> None:
        """Has the first plan wait for what an attempt holds that we did not start."""
        self._free_before.update(free_bytes)

    def to_the_end(self, undecided: Diagnosis | None) -> Outcome:
        """Attempts until one is the last."""
        try:
            decision: Decision = Restart(reason="")
            if undecided is not None:
                decision = self._decide(undecided)
                if isinstance(decision, Restart):
                    # Whoever called us has waited already.
                    decision = replace(decision, delay_s=0.0)
            while isinstance(decision, Restart):
                self._stops.sleep(decision.delay_s)
                others = self._gang.assemble() if self._gang is not None else []
                if self._stops.requested:
                    decision = Stop(reason="stopped before the next attempt")
                else:
                    decision = self._decide(self._attempt(others))
            return self._end(decision)
        except JournalError:
            raise  # it cannot even be recorded
        except OomrunError as error:
            self._record_end("failed", error.exit_code, str(error))
            raise

    def _attempt(self, others: Sequence[Inventory]) -> Diagnosis:
        job, recorder = self._job, self._recorder
        number = recorder.state.attempt + 1
        plan, inventory = self._plan(others)
        count = group_planning.ranks(plan)
        with contextlib.ExitStack() as stack:
            meeting = None
            if plan.strategy in IN_WORKERS:
                # Workers of other hosts have to come here, too.
                made = Rendezvous() if self._gang is None else Rendezvous("")
                meeting = stack.enter_context(contextlib.closing(made))
            workers = start_workers(
                job, plan, recorder.state, number, inventory, meeting, self._gang
            )
            try:
                recorder.record(
                    ev.AttemptStarted(
                        at=time.time(),
                        attempt=number,
                        plan=plans.to_json(plan),
                        pids=tuple(worker.pid for worker in workers),
                    )
                )
            except BaseException:
                end(workers)
                raise
            rank, evidence = watch(
                workers,
                number,
                recorder,
                logs=[job.run_dir.attempt(number).log(n) for n in range(count)],
                stops=self._stops,
                timing=job.timing,
                descendants=job.owns_process,
                oom_kills=host.oom_kill_count,
                shm_free=host.shm_free_bytes,
                answer=self._remembering.answer,
            )
        self._remembering.keep(recorder.state)
        if isinstance(job.spec.program, Command):
            log, before = (job.run_dir.attempt(n).log() for n in (number, number - 1))
            evidence = of_command(evidence, plan.devices[0].id, log, before)
        ended = diagnosis.diagnose(evidence)
        if count > 1 and ended.cause is not Cause.FINISHED:
            ended = replace(ended, summary=f"worker {rank}: {ended.summary}")
        if evidence.command and ended.cause is Cause.DEVICE_OOM:
            recorder.record(oom_of_command(number, plan, ended))
        recorder.record(attempt_ended(number, ended, evidence, rank))
        return ended

    def _plan(self, others: Sequence[Inventory]) -> tuple[Plan, Inventory]:
        """The next plan and its machine, once the memory of a dead worker is back."""
        for device, free in self._free_before.items():
            self._wait_for_memory(device, free)
        inventory = self._look()
        plan = group_planning.plan_for(
            self._job.spec,
            inventory,
            self._recorder.state,
            others,
            horovod=horovod_installed(),
        )
        used = {device.id for device in plan.devices if device.kind != "cpu"}
        for found in inventory.devices:
            if found.id in used and found.free_bytes is not None:
                self._free_before[found.id] = found.free_bytes
        return plan, inventory

    def _wait_for_memory(self, device: str, free_bytes: int) -> None:
        """A dead process's GPU memory comes back a while after it is gone."""
        until = time.monotonic() + self._job.timing.memory_back_s
        # Not to the last byte: other processes come and go.
        wanted = int(free_bytes * 0.95)
        # Opening NVML may take longer than a slice, if nothing keeps the driver awake.
        with devices.held_open(devices.READING_TIMEOUT_S):
            while not self._stops.requested and time.monotonic() < until:
                waited = devices.wait_until_free(
                    device, wanted, timeout_s=_WAIT_SLICE_S
                )
                if waited.reached or isinstance(waited.memory, Unreadable):
                    return

    def _decide(self, ended: Diagnosis) -> Decision:
        state = self._recorder.state
        decision = policy.decide(
            ended, state, self._limits, stopping=self._stops.requested
        )
        self._recorder.record(decision_made(state.attempt, ended, decision))
        return decision

    def _end(self, decision: Finish | Fail | Stop) -> Outcome:
        match decision:
            case Finish():
                state, code, reason = "completed", 0, decision.reason
            case Fail():
                state, code, reason = "failed", decision.exit_code, decision.reason
            case Stop():
                state, code = "preempted", self._stops.exit_code
                reason = f"{self._stops.reason or 'stopped'}: {decision.reason}"
        return self._record_end(state, code, reason)

    def _record_end(self, state: str, code: int, reason: str) -> Outcome:
        end = ev.RunEnded(at=time.time(), state=state, exit_code=code, reason=reason)
        return Outcome(exit_code=code, reason=reason, state=self._recorder.record(end))


def _planned_bytes(state: JobState) -> dict[str, int]:
    """What the last attempt was to use of each GPU: so much was free before it."""
    return {
        device["id"]: device["limit_bytes"]
        for device in (state.plan or {}).get("devices", ())
        if device["kind"] != "cpu" and device["limit_bytes"] is not None
    }


def _new_seed() -> int:
    return random.SystemRandom().getrandbits(31)


def _discover(job: Job) -> Inventory:
    return devices.discover({**job.environment, **dict(job.spec.env)})
