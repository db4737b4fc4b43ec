"""From cause to decision: what follows an attempt.

Covers: ``decide``, a function of the cause, the job's state and the limits the user
set. Counts come from the state, which comes from the journal, so that a supervisor
that died and was started again decides the same. Does not cover: carrying it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oomrun.core import batch, command, levers, state_memory
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.events import ScriptEnded
from oomrun.core.state import JobState
from oomrun.core.topology import HOST_ID

__all__ = ["Decision", "Fail", "Finish", "Limits", "Restart", "Stop", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the job file allows.

    Attributes:
        max_restarts: restarts per budget; None: unlimited.
        levers: what may be changed when memory ran out.
        micro_batch_fixed: the job file names the micro-batch, so it stays.
        command: the program is not ours: whether it moved cannot be seen, and its
            micro-batch divides the global batch.
    """

    max_restarts: Mapping[str, int | None]
    levers: tuple[str, ...] = ("micro_batch",)
    micro_batch_fixed: bool = False
    command: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The script finished."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start another attempt, with ``micro_batch_size`` samples a pass at most.

    ``levers`` are those in force from then on, ``left_out`` the devices that it goes on
    without; None: as before.
    """

    reason: str
    micro_batch_size: int | None = None
    delay_s: float = 0.0
    levers: tuple[str, ...] | None = None
    left_out: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Give up. ``exit_code`` is 1, or 3 where nothing fits."""

    reason: str
    exit_code: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End now, to be resumed later."""

    reason: str


Decision = Finish | Restart | Fail | Stop


def decide(
    diagnosis: Diagnosis, state: JobState, limits: Limits, *, stopping: bool = False
) -> Decision:
    """What follows an attempt that ended with ``diagnosis``.

    Args:
        diagnosis: why the attempt ended.
        state: the run so far, that attempt's end included.
        limits: what the job file allows.
        stopping: we were asked to stop: nothing is started any more.
    """
    cause = diagnosis.cause
    if cause is Cause.FINISHED:
        return Finish(reason=diagnosis.summary)
    if stopping:
        return Stop(reason=diagnosis.summary)
    if cause is Cause.MISCONFIGURATION:
        return Fail(reason=diagnosis.summary, exit_code=4)
    if cause is Cause.LEAK:
        # Not counted where training moves on.
        return _after_leak(diagnosis, state, limits)
    used = state.budget_used[cause.budget]
    allowed = limits.max_restarts.get(cause.budget, 0)
    if allowed is not None and used >= allowed:
        setting = f"recovery.max_restarts.{cause.budget}: {allowed}"
        return Fail(reason=f"{diagnosis.summary}; no restart is left ({setting})")
    if cause is Cause.DEVICE_OOM:
        return _after_device_oom(diagnosis, state, limits)
    if cause is Cause.HOST_OOM:
        left = levers.left(limits.levers, state, cause)
        if left is not None and not limits.command:
            return _pull(left, diagnosis, state)
        if diagnosis.container and _moved(state):
            # It may have grown slowly, and begins anew.
            return Restart(reason=diagnosis.summary, delay_s=_back_off_s(used))
        return Fail(
            reason=f"{diagnosis.summary}. A smaller micro-batch does not shrink what "
            "the script itself keeps in host memory: give the machine or the cgroup "
            "more memory, or load less data at once"
        )
    if cause.of_the_program and limits.command:
        return _after_crash_of_command(diagnosis, used)
    if cause.of_the_program:
        return _after_crash(diagnosis, state, used)
    return Restart(reason=diagnosis.summary, delay_s=_back_off_s(used))


def _after_device_oom(
    diagnosis: Diagnosis, state: JobState, limits: Limits
) -> Decision:
    """The next lever, in the order of the job file."""
    if limits.command:
        return _by_micro_batch(diagnosis, state, limits)
    worse = levers.to_take_back(state)
    if worse is not None:
        return _take_back(worse, f"{diagnosis.summary}, which ran before it", state)
    limit = state_memory.planned_limit_bytes(state.plan)
    if limit is not None and (state.state_bytes or 0) > limit:
        # Weights, gradients and slots alone: no micro-batch would be small enough.
        slots = levers.for_state(limits.levers, state)
        if slots is not None:
            return _pull(slots, diagnosis, state)
    due = levers.due(limits.levers, state, state.plan)
    if due is not None:
        return _pull(due, diagnosis, state)
    decision = _by_micro_batch(diagnosis, state, limits)
    if isinstance(decision, Fail):
        left = levers.left(limits.levers, state, diagnosis.cause)
        if left is not None:
            return _pull(left, diagnosis, state)
        why = levers.not_tried(limits.levers, state)
        return replace(decision, reason=f"{decision.reason}{why}")
    return decision


def _pull(name: str, diagnosis: Diagnosis, state: JobState) -> Restart:
    if name == levers.FEWER_DEVICES:
        device = levers.to_leave_out(state, diagnosis.cause) or ""
        return Restart(
            reason=f"{diagnosis.summary}: without {device} from now on, by the lever "
            f"{levers.in_words(name)}",
            left_out=(*(known for known in state.left_out if known != device), device),
        )
    return Restart(
        reason=f"{diagnosis.summary}: lever {levers.in_words(name)}",
        levers=(*state.levers, name),
    )


def _take_back(name: str, why: str, state: JobState) -> Restart:
    return Restart(
        reason=f"{why}: lever {name} is taken back",
        levers=tuple(lever for lever in state.levers if lever != name),
    )


def _by_micro_batch(diagnosis: Diagnosis, state: JobState, limits: Limits) -> Decision:
    failed = state.micro_batch_failed or state.micro_batch_size
    # Of another worker than the first it is not known what ran.
    first = state.last_oom is None or state.last_oom.rank == 0
    if state.last_oom is not None and not first:
        failed = state.last_oom.micro_batch_size
    uncut = state.last_oom is not None and state.last_oom.recovery == "none"
    if uncut and _moved(state):
        # Where nothing is cut, a step is like the next. A pool in fragments, or one
        # that something else has filled, is whole again in a new process.
        return Restart(
            reason=f"{diagnosis.summary}. Such a step fitted before in this attempt, "
            "so the process has come to hold other things: again, in a new process"
        )
    if uncut:
        return Fail(
            reason=f"{diagnosis.summary}. The batches of this model cannot be cut into "
            "micro-batches (the notes say why): give the script a smaller batch",
            exit_code=3,
        )
    if "micro_batch" not in limits.levers:
        return Fail(
            reason=f"{diagnosis.summary}, and recovery.levers allows no change",
            exit_code=3,
        )
    if limits.micro_batch_fixed:
        return Fail(
            reason=f"{diagnosis.summary}, and batch.micro is a fixed number: "
            "{max: …} or auto would let it shrink",
            exit_code=3,
        )
    if failed is None and limits.command:
        return Fail(
            reason=f"{diagnosis.summary}. The program is told no micro-batch: with "
            "batch.global and {micro_batch} in the job file it could be started again "
            "with a smaller one",
            exit_code=3,
        )
    if failed is None:
        return Fail(
            reason=f"{diagnosis.summary}, before any batch was trained by fit or "
            "oomrun.Loop: the model itself, or what the script puts on the device, is "
            "larger than the limit, or the script trains in a loop of its own, which "
            "cannot be cut into micro-batches unless it is written with oomrun.Loop "
            "(docs/custom-loops.md)",
            exit_code=3,
        )
    # Batches may differ in size: what failed may have been larger than the first one.
    share = max(state.global_batch_size or 0, failed)
    applying = state.last_oom is not None and state.last_oom.phase == "apply"
    if applying and failed < share and _moved(state):
        # Its need is not the micro-batch's, and it has been met: a pool that has become
        # fragmented is whole again in a new process.
        return Restart(
            reason=f"{diagnosis.summary}. That was in the optimizer, which had room "
            "before in this attempt: again, in a new process",
            micro_batch_size=failed,
        )
    # Not at once: some of a micro-batch's tensors may still have been there.
    if applying and failed < share and state.budget_used["oom"] >= 2:
        return Fail(
            reason=f"{diagnosis.summary}. That was in the optimizer, whose need does "
            "not depend on the micro-batch: an optimizer with less state, or a smaller "
            "model, would need less",
            exit_code=3,
        )
    ran = _known_to_run(state, failed) if first else 0
    smaller = batch.smaller_micro_batch(share, failed, ran)
    if smaller and limits.command:
        smaller = command.divisor(share, smaller)
    if smaller == 0 and _moved(state):
        return Restart(
            reason=f"{diagnosis.summary}. More fitted before in this attempt, so the "
            "process has come to hold other things: again, in a new process",
            micro_batch_size=1 if first else None,
        )
    if smaller == 0:
        return Fail(
            reason=f"{diagnosis.summary}: even one sample at a time does not fit",
            exit_code=3,
        )
    steps = batch.accumulation_steps(share, smaller)
    return Restart(
        reason=f"{diagnosis.summary}: micro-batch {failed} -> {smaller} "
        f"x {steps} (global {share})",
        # Another worker's is in ``failed_by_rank``, and no limit for the first one.
        micro_batch_size=smaller if first else None,
    )


# Below this share of the budget what grows has so little room that restarts would come
# soon one after the other: then a smaller micro-batch makes more.
_ROOM = 0.25


def _after_leak(diagnosis: Diagnosis, state: JobState, limits: Limits) -> Decision:
    leak, size = state.last_leak, state.micro_batch_size
    may = "micro_batch" in limits.levers and not limits.micro_batch_fixed
    allowed = limits.max_restarts.get("crash", 0)
    if allowed is not None and state.leaks_in_place > allowed:
        return Fail(
            reason=f"{diagnosis.summary}. The restarts before went back to where they "
            "came from, so training does not move on: can checkpoints be written? "
            f"(recovery.max_restarts.crash: {allowed})"
        )
    if leak is None or leak.device == HOST_ID or not size or size < 2 or not may:
        return Restart(reason=diagnosis.summary)
    if leak.grown_bytes >= _ROOM * leak.budget_bytes:
        return Restart(reason=diagnosis.summary)
    share = max(state.global_batch_size or 0, size)
    smaller = batch.smaller_micro_batch(share, size)
    steps = batch.accumulation_steps(share, smaller)
    return Restart(
        reason=f"{diagnosis.summary}. To leave it more room: micro-batch {size} -> "
        f"{smaller} x {steps} (global {share})",
        micro_batch_size=smaller,
    )


def _known_to_run(state: JobState, failed: int) -> int:
    limit = state_memory.planned_limit_bytes(state.plan)
    return batch.known_to_run(failed, state.measured, state.recorded, limit)


def _moved(state: JobState) -> bool:
    """Whether the attempt that ended has trained a step."""
    return state.step > state.step_at_attempt_start


def _after_crash(diagnosis: Diagnosis, state: JobState, used: int) -> Decision:
    script = state.script
    moved = _moved(state)
    if state.levers and state.attempt == state.lever_attempt and not moved:
        why = f"{diagnosis.summary}, before a step was trained with it"
        return _take_back(state.levers[-1], why, state)
    if diagnosis.silent and not moved and used > 0:
        return Fail(
            reason=f"{diagnosis.summary}, twice without a step between. A script that "
            "calls os._exit cannot say how it ended"
        )
    if script is not None and not moved:
        # The same input, the same code, no step in between: it would fail again.
        return Fail(
            reason=f"{diagnosis.summary}. No step was trained in this attempt, so "
            "the same would happen again"
        )
    if script is not None and state.ended_before is not None:
        before, step = state.ended_before
        if step == state.step and _ended_alike(before, script):
            # It trained again what had been trained since the last checkpoint.
            return Fail(
                reason=f"{diagnosis.summary}, twice at step {step}: the same would "
                "happen again"
            )
    return Restart(reason=diagnosis.summary, delay_s=_back_off_s(used))


def _ended_alike(one: ScriptEnded, other: ScriptEnded) -> bool:
    """Whether a script has failed in the same way and place."""
    how = ("outcome", "exit_code", "exception", "location")
    return all(getattr(one, name) == getattr(other, name) for name in how)


def _after_crash_of_command(diagnosis: Diagnosis, used: int) -> Decision:
    if diagnosis.repeated and used > 0:
        return Fail(
            reason=f"{diagnosis.summary}, twice with the very same output: it would "
            "fail again"
        )
    return Restart(reason=diagnosis.summary, delay_s=_back_off_s(used))


def _back_off_s(used: int) -> float:
    """0, then 1, 2, 4 … seconds, a minute at most."""
    return 0.0 if used == 0 else min(60.0, 2.0 ** min(used - 1, 6))
