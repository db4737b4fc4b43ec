"""Taking up a run that an earlier call began: may we, and where does it stand.

Covers: what the journal tells of a run whose supervisor is gone. Does not cover: going
on with it (``supervisor``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oomrun import journal
from oomrun.core import events as ev
from oomrun.core.diagnosis import Cause, Diagnosis, Evidence, diagnose
from oomrun.core.errors import JournalError, Problem, SpecError, would_train_another
from oomrun.core.spec import Script, mathematics
from oomrun.core.state import JobState, replay
from oomrun.launching import Job, checkpoint_dir

__all__ = [
    "changed_keys",
    "check_apart",
    "check_same",
    "end_of_lost_attempt",
    "reason",
    "run_id",
    "undecided",
]


def run_id(path: Path) -> str:
    """The id of the run in the journal at ``path``, "" where it tells none."""
    try:
        return replay(journal.read(path)).run_id
    except JournalError:
        return ""  # starting over is the way out of a damaged journal


def check_apart(job: Job) -> None:
    """Refuses to start over where the earlier run's folders hold more than the run.

    They are renamed as they are, and all that is in them with them.

    Raises:
        SpecError: naming the folder and what is in it.
    """
    run_dir, checkpoints = job.run_dir.path, checkpoint_dir(job)
    others = {"the folder that oomrun was called in": job.cwd}
    problem = _holding(job, "--run-dir", run_dir, others)
    if checkpoints.resolve() != run_dir.resolve():
        others |= {"the run's own folder": run_dir, "the job file": job.job_file}
        if isinstance(job.spec.program, Script):
            others["the script"] = job.job_file.parent / job.spec.program.path
        problem = problem or _holding(job, "checkpoint.dir", checkpoints, others)
    if problem is not None:
        raise SpecError([problem])


def _holding(
    job: Job, path: str, folder: Path, others: Mapping[str, Path]
) -> Problem | None:
    """What is wrong with a folder that is to be renamed; None: nothing is."""
    whole = folder.resolve()
    for name, other in others.items():
        if other.resolve().is_relative_to(whole):
            return Problem(
                file=str(job.job_file),
                line=1,
                column=1,
                path=path,
                message=f"{folder} holds {name}, and --fresh would rename it",
                hint="name a folder of its own, or delete what the run left there",
            )
    return None


def check_same(job: Job, state: JobState) -> None:
    """Refuses to go on with a run that would train something else now.

    Raises:
        SpecError: with a problem for each setting that changed.
    """
    changed = changed_keys(state.mathematics, mathematics(job.spec))
    if not changed or (job.allow_changes and state.state != "completed"):
        return
    messages = {
        key: f"was {was!r} when the run in {job.run_dir.path} began, and is {now!r} now"
        for key, was, now in changed
    }
    hint = "--fresh starts over, --run-dir keeps both"
    if state.state != "completed":
        hint += ", --allow-changes goes on"
    raise would_train_another(str(job.job_file), messages, hint)


def changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """The settings that differ, each by its own name, with both values."""
    changed: list[tuple[str, Any, Any]] = []
    for key in sorted({*before, *now}):
        was, new = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(new, Mapping):
            inner = changed_keys(was, new)
            prefix = "" if key == "program" else f"{key}."
            changed += [(prefix + name, old, fresh) for name, old, fresh in inner]
        elif was != new:
            changed.append((key, was, new))
    return changed


def reason(state: JobState) -> str:
    """Why there is something to go on with."""
    if state.state == "preempted":
        return "it was stopped"
    if state.attempt_open:
        return "oomrun itself was killed during an attempt"
    return "oomrun itself was killed"


def end_of_lost_attempt(state: JobState, host_oom: str = "") -> Diagnosis:
    """Why the attempt ended that no supervisor saw the end of.

    What its worker reported counts as ever; without a report it was taken down along
    with its supervisor, as when the machine is taken away.

    Args:
        state: the run as its journal has it.
        host_oom: what was seen of host memory, if that says that it ran out.
    """
    oom, leak = state.last_oom, state.last_leak
    restarting = leak is not None or (oom is not None and oom.recovery == "restart")
    if state.script is not None or restarting:
        return diagnose(Evidence(script=state.script, oom=oom, leak=leak))
    if host_oom:
        return Diagnosis(cause=Cause.HOST_OOM, summary=host_oom, container=True)
    return Diagnosis(
        cause=Cause.PREEMPTION, summary="oomrun was killed, and the attempt with it"
    )


def undecided(events: Sequence[ev.Event]) -> Diagnosis | None:
    """The end of the last attempt if nothing was made of it before the journal ends.

    A decision to finish or to give up that was not carried out is made again: it
    hangs on nothing but the journal, so it is the same.
    """
    for event in reversed(events):
        match event:
            case ev.AttemptEnded():
                known = event.cause in Cause._value2member_map_
                cause = Cause(event.cause) if known else Cause.CRASH
                return Diagnosis(cause=cause, summary=event.summary)
            case ev.DecisionMade(action="finish" | "fail"):
                continue
            case ev.DecisionMade() | ev.AttemptStarted() | ev.RunEnded():
                return None
            case ev.RunStarted():
                return None
    return None
