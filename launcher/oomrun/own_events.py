"""The events of a run that its supervisor adds: how an attempt ended, what follows.

Covers: making them from what was seen and decided. Does not cover: deciding
(``core.policy``) and writing them down (``recorder``).
"""

from __future__ import annotations

import time

from oomrun.core import events as ev
from oomrun.core.diagnosis import Diagnosis, Evidence
from oomrun.core.plan import Plan
from oomrun.core.policy import Decision, Fail, Finish, Restart, Stop

__all__ = ["attempt_ended", "decision_made", "oom_of_command"]


def attempt_ended(
    attempt: int, ended: Diagnosis, evidence: Evidence, rank: int = 0
) -> ev.AttemptEnded:
    """An attempt's end as diagnosed; ``rank`` is the worker that failed first."""
    return ev.AttemptEnded(
        at=time.time(),
        attempt=attempt,
        cause=ended.cause.value,
        summary=ended.summary,
        exit_code=evidence.exit_code,
        signal=evidence.signal,
        rank=rank,
    )


def oom_of_command(attempt: int, plan: Plan, ended: Diagnosis) -> ev.OomOccurred:
    """Memory that a command has run out of, as its output says."""
    (device,) = plan.devices
    return ev.OomOccurred(
        at=time.time(),
        attempt=attempt,
        rank=0,
        device=device.id,
        kind="device",
        phase="unknown",
        recovery="restart",
        micro_batch_size=device.micro_batch_size,
        step=0,
        message=ended.told,
    )


def decision_made(
    attempt: int, ended: Diagnosis, decision: Decision
) -> ev.DecisionMade:
    """What follows an attempt."""
    action, delay_s, micro = "restart", 0.0, None
    match decision:
        case Restart():
            delay_s, micro = decision.delay_s, decision.micro_batch_size
        case Finish():
            action = "finish"
        case Fail():
            action = "fail"
        case Stop():
            action = "stop"
    return ev.DecisionMade(
        at=time.time(),
        attempt=attempt,
        action=action,
        cause=ended.cause.budget,
        reason=decision.reason,
        micro_batch_size=micro,
        delay_s=delay_s,
        levers=decision.levers if isinstance(decision, Restart) else None,
        left_out=decision.left_out if isinstance(decision, Restart) else None,
    )
