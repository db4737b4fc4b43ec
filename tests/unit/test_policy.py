"""Cause -> decision: budgets per cause, a ladder that ends, a reason for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import scenarios
from oomrun.core import events as ev
from oomrun.core.diagnosis import Cause, Diagnosis
from oomrun.core.policy import Fail, Finish, Limits, Restart, Stop, decide
from oomrun.core.state import JobState, replay
from oomrun.own_events import decision_made

LIMITS = Limits(max_restarts={"oom": 10, "crash": 3, "preemption": None, "hang": 3})


def ended(cause: Cause) -> Diagnosis:
    return Diagnosis(cause=cause, summary=f"it was {cause.value}")


def state(**fields: Any) -> JobState:
    used = fields.pop("used", {})
    return replace(JobState(), budget_used={**JobState().budget_used, **used}, **fields)


REPORT = ev.ScriptEnded(at=1.0, attempt=1, rank=0, outcome="raised", exit_code=1)


def test_finished_finishes_even_while_stopping() -> None:
    for stopping in (False, True):
        done = decide(ended(Cause.FINISHED), state(), LIMITS, stopping=stopping)
        assert isinstance(done, Finish)


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.FINISHED])
def test_nothing_is_started_while_stopping(cause: Cause) -> None:
    assert isinstance(decide(ended(cause), state(), LIMITS, stopping=True), Stop)


def test_an_oom_halves_the_micro_batch_and_says_so() -> None:
    before = state(global_batch_size=256, micro_batch_failed=256)
    decision = decide(ended(Cause.DEVICE_OOM), before, LIMITS)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == 128
    assert decision.delay_s == 0
    assert "micro-batch 256 -> 128 x 2 (global 256)" in decision.reason


def test_a_batch_larger_than_the_first_is_halved_from_its_own_size() -> None:
    before = state(global_batch_size=64, micro_batch_failed=6144)
    decision = decide(ended(Cause.DEVICE_OOM), before, LIMITS)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == 3072


def test_what_the_optimizer_needs_is_not_met_with_a_smaller_micro_batch() -> None:
    oom = ev.OomOccurred(
        at=1.0, attempt=1, rank=0, device="cpu:0", kind="device", phase="apply",
        recovery="restart", micro_batch_size=256, step=3, message="",
    )  # fmt: skip
    whole = state(global_batch_size=256, micro_batch_failed=256, last_oom=oom)
    # Of the whole batch some activations may still be there.
    assert isinstance(decide(ended(Cause.DEVICE_OOM), whole, LIMITS), Restart)
    cut = replace(whole, micro_batch_failed=128)
    assert isinstance(decide(ended(Cause.DEVICE_OOM), cut, LIMITS), Restart)
    again = replace(cut, budget_used={**cut.budget_used, "oom": 2})
    decision = decide(ended(Cause.DEVICE_OOM), again, LIMITS)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3
    assert "in the optimizer" in decision.reason


def test_an_optimizer_that_had_room_before_gets_a_new_process() -> None:
    oom = ev.OomOccurred(
        at=1.0, attempt=1, rank=0, device="cpu:0", kind="device", phase="apply",
        recovery="restart", micro_batch_size=128, step=3, message="",
    )  # fmt: skip
    moved = state(
        global_batch_size=256, micro_batch_failed=128, last_oom=oom, used={"oom": 5},
        step=12, step_at_attempt_start=9,
    )  # fmt: skip
    decision = decide(ended(Cause.DEVICE_OOM), moved, LIMITS)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == 128
    assert "in a new process" in decision.reason
    stuck = replace(moved, step_at_attempt_start=12)
    assert isinstance(decide(ended(Cause.DEVICE_OOM), stuck, LIMITS), Fail)
    spent = replace(moved, budget_used={**moved.budget_used, "oom": 10})
    assert isinstance(decide(ended(Cause.DEVICE_OOM), spent, LIMITS), Fail)


def test_a_batch_that_cannot_be_cut_gets_a_new_process_where_it_had_fitted() -> None:
    oom = ev.OomOccurred(
        at=1.0, attempt=1, rank=0, device="cpu:0", kind="device", phase="gradients",
        recovery="none", micro_batch_size=16, step=12, message="",
    )  # fmt: skip
    moved = state(
        global_batch_size=16, micro_batch_failed=16, last_oom=oom,
        step=12, step_at_attempt_start=9,
    )  # fmt: skip
    decision = decide(ended(Cause.DEVICE_OOM), moved, LIMITS)
    assert isinstance(decision, Restart)
    assert "in a new process" in decision.reason
    stuck = replace(moved, step_at_attempt_start=12)
    decision = decide(ended(Cause.DEVICE_OOM), stuck, LIMITS)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3
    assert "cannot be cut" in decision.reason


@pytest.mark.parametrize("rank", [0, 1])
def test_one_sample_that_no_longer_fits_gets_a_new_process(rank: int) -> None:
    oom = ev.OomOccurred(
        at=1.0, attempt=1, rank=rank, device="cpu:0", kind="device", phase="gradients",
        recovery="restart", micro_batch_size=1, step=12, message="",
    )  # fmt: skip
    moved = state(
        global_batch_size=256, micro_batch_failed=1, last_oom=oom, used={"oom": 5},
        step=12, step_at_attempt_start=9,
    )  # fmt: skip
    decision = decide(ended(Cause.DEVICE_OOM), moved, LIMITS)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == (1 if rank == 0 else None)
    assert "in a new process" in decision.reason
    stuck = replace(moved, step_at_attempt_start=12)
    decision = decide(ended(Cause.DEVICE_OOM), stuck, LIMITS)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3


@pytest.mark.parametrize(
    ("known", "next_size"),
    [
        ({"measured": {200: 9}}, 200),
        ({"measured": {250: 9}}, 128),  # hardly less than what failed
        ({"measured": {60: 9}}, 128),
        ({"measured": {250: 9}, "recorded": {256: 8}}, 204),  # little was missing
    ],
)
def test_a_size_that_should_run_is_not_halved_past(
    known: dict[str, dict[int, int]], next_size: int
) -> None:
    before = state(global_batch_size=256, micro_batch_failed=256, **known)
    decision = decide(ended(Cause.DEVICE_OOM), before, LIMITS)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == next_size


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"micro_batch_failed": 1, "global_batch_size": 8}, LIMITS),
        ({}, LIMITS),
        ({"micro_batch_failed": 8}, replace(LIMITS, levers=())),
        ({"micro_batch_failed": 8}, replace(LIMITS, micro_batch_fixed=True)),
    ],
    ids=["one sample", "before any batch", "no lever", "fixed"],
)
def test_an_oom_that_nothing_can_be_done_about(
    fields: dict[str, Any], limits: Limits
) -> None:
    decision = decide(ended(Cause.DEVICE_OOM), state(**fields), limits)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 3


def test_a_loop_of_the_script_s_own_is_one_explanation() -> None:
    decision = decide(ended(Cause.DEVICE_OOM), state(), LIMITS)
    assert isinstance(decision, Fail)
    assert "before any batch was trained by fit or oomrun.Loop" in decision.reason
    assert "docs/custom-loops.md" in decision.reason


def test_the_oom_ladder_ends() -> None:
    now, sizes = state(global_batch_size=1000, micro_batch_failed=1000), []
    while isinstance(d := decide(ended(Cause.DEVICE_OOM), now, LIMITS), Restart):
        assert d.micro_batch_size is not None
        sizes.append(d.micro_batch_size)
        now = replace(now, micro_batch_failed=d.micro_batch_size)
    assert sizes == [500, 250, 125, 62, 31, 15, 7, 3, 1]


@pytest.mark.parametrize(
    ("cause", "budget"),
    [
        (Cause.DEVICE_OOM, "oom"),
        (Cause.CRASH, "crash"),
        (Cause.KILLED, "crash"),
        (Cause.HANG, "hang"),
    ],
)
def test_each_budget_is_its_own(cause: Cause, budget: str) -> None:
    ready = {"global_batch_size": 8, "micro_batch_failed": 8}
    others = {"oom": 99, "crash": 99, "preemption": 99, "hang": 99, budget: 0}
    assert isinstance(
        decide(ended(cause), state(used=others, **ready), LIMITS), Restart
    )
    spent = {budget: LIMITS.max_restarts[budget]}
    decision = decide(ended(cause), state(used=spent, **ready), LIMITS)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 1
    assert f"recovery.max_restarts.{budget}" in decision.reason


def test_unlimited_is_unlimited() -> None:
    many = state(used={"preemption": 10**6})
    assert isinstance(decide(ended(Cause.PREEMPTION), many, LIMITS), Restart)


def test_a_script_that_raises_without_a_step_would_do_so_again() -> None:
    decision = decide(ended(Cause.CRASH), state(script=REPORT), LIMITS)
    assert isinstance(decision, Fail)
    moved = state(script=REPORT, step=5, step_at_attempt_start=4)
    assert isinstance(decide(ended(Cause.CRASH), moved, LIMITS), Restart)


@pytest.mark.parametrize("window", [1, 50, 400])
@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.HOST_OOM, Cause.DEVICE_OOM])
def test_an_attempt_that_began_anew_has_trained_what_it_trained(
    cause: Cause, window: int
) -> None:
    """Below where the one before was, which had no checkpoint yet."""
    device = {"id": "cpu:0", "kind": "cpu", "limit_bytes": 100}
    events: list[ev.Event] = []
    for attempt, steps in ((1, 450), (2, 400)):
        plan = {"global_batch_size": 64, "devices": [device]}
        events.append(ev.AttemptStarted(at=1.0, attempt=attempt, plan=plan))
        events += [
            scenarios.progressed(
                1.0,
                step,
                attempt=attempt,
                window_steps=min(window, step),
                micro_batch_size=1,
                memory=(),
            )
            for step in range(min(window, steps), steps + 1, window)
        ]
    out = scenarios.oom(1.0, "restart", size=1, step=400)
    events.append(replace(out, attempt=2, phase="gradients", memory=()))
    seen = replace(replay(events), script=replace(REPORT, attempt=2))
    assert seen.step == 400 // window * window
    killed = replace(ended(cause), container=cause is Cause.HOST_OOM)
    assert isinstance(decide(killed, seen, LIMITS), Restart)


def test_a_script_that_raises_twice_at_one_step_would_do_so_again() -> None:
    # From the checkpoint of step 4 on, the fifth was trained again.
    there = {"script": REPORT, "step": 5, "step_at_attempt_start": 4}
    again = decide(ended(Cause.CRASH), state(ended_before=(REPORT, 5), **there), LIMITS)
    assert isinstance(again, Fail)
    assert "twice at step 5" in again.reason
    other = replace(REPORT, exception="KeyError")
    for before in ((REPORT, 3), (REPORT, 7), (other, 5)):
        seen = state(ended_before=before, **there)
        assert isinstance(decide(ended(Cause.CRASH), seen, LIMITS), Restart)


@pytest.mark.parametrize(
    ("used", "delay_s"), [(0, 0.0), (1, 1.0), (2, 2.0), (5, 16.0), (40, 60.0)]
)
def test_back_off(used: int, delay_s: float) -> None:
    generous = replace(LIMITS, max_restarts={"crash": None})
    decision = decide(ended(Cause.KILLED), state(used={"crash": used}), generous)
    assert decision == Restart(reason="it was killed", delay_s=delay_s)


def test_host_memory_is_not_met_with_a_smaller_micro_batch() -> None:
    decision = decide(ended(Cause.HOST_OOM), state(micro_batch_failed=8), LIMITS)
    assert isinstance(decision, Fail)
    assert "host memory" in decision.reason


def test_a_container_that_was_killed_for_host_memory() -> None:
    """What may be changed is changed; else it goes on if it had got anywhere."""
    killed = Diagnosis(cause=Cause.HOST_OOM, summary="it was killed", container=True)
    moved = state(step=5, step_at_attempt_start=4)
    assert decide(killed, moved, LIMITS) == Restart(reason="it was killed")
    listed = replace(LIMITS, levers=("micro_batch", "host_pipeline"))
    decision = decide(killed, moved, listed)
    assert isinstance(decision, Restart)
    assert decision.levers == ("host_pipeline",)
    pulled = replace(
        moved, levers=("host_pipeline",), levers_tried=frozenset({"host_pipeline"})
    )
    assert decide(killed, pulled, listed) == Restart(reason="it was killed")
    stood = replace(pulled, step=4)
    assert isinstance(decide(killed, stood, listed), Fail)


def test_a_worker_that_cannot_start_is_our_side() -> None:
    decision = decide(ended(Cause.MISCONFIGURATION), state(), LIMITS)
    assert isinstance(decision, Fail)
    assert decision.exit_code == 4


# -- leaks -----------------------------------------------------------------------------


def leaking(grown: int, device: str = "cpu:0", **fields: Any) -> JobState:
    leak = ev.LeakFound(
        at=1.0, attempt=1, device=device, step=80, bytes_per_step=1.0,
        grown_bytes=grown, budget_bytes=1000, steps_left=9,
    )  # fmt: skip
    known = {"micro_batch_size": 64, "global_batch_size": 128, **fields}
    return state(last_leak=leak, **known)


@pytest.mark.parametrize(
    ("grown", "fields", "limits", "size"),
    [
        (250, {}, LIMITS, None),  # a quarter of the budget is room enough
        (249, {}, LIMITS, 32),
        (10, {"micro_batch_size": 1}, LIMITS, None),
        (10, {"micro_batch_size": None}, LIMITS, None),
        (10, {}, replace(LIMITS, micro_batch_fixed=True), None),
        (10, {}, replace(LIMITS, levers=()), None),
        (10, {"device": "host"}, LIMITS, None),  # which a micro-batch leaves as it is
    ],
)
def test_a_leak_is_given_room(
    grown: int, fields: dict[str, Any], limits: Limits, size: int | None
) -> None:
    decision = decide(ended(Cause.LEAK), leaking(grown, **fields), limits)
    assert isinstance(decision, Restart)
    assert decision.micro_batch_size == size
    assert decision.delay_s == 0


def test_leaks_are_not_counted_against_any_limit() -> None:
    used = dict.fromkeys(("oom", "crash", "preemption", "hang", "leak"), 10**6)
    decision = decide(ended(Cause.LEAK), leaking(500, used=used), LIMITS)
    assert isinstance(decision, Restart)


@pytest.mark.parametrize("allowed", [0, 3])
def test_leaks_end_where_no_checkpoint_keeps_what_was_trained(allowed: int) -> None:
    """A disk that stays full: each attempt trains the same steps."""
    limits = replace(LIMITS, max_restarts={**LIMITS.max_restarts, "crash": allowed})
    leak = leaking(500).last_leak
    assert leak is not None
    for saved in (True, False):
        seen, made = JobState(), 0
        while made < 50:
            made += 1
            begun = 20 * (made - 1) if saved else 0
            seen = seen.after(ev.AttemptStarted(at=1.0, attempt=made, plan={}))
            for step in range(begun + 1, begun + 21):
                trained = scenarios.progressed(
                    1.0, step, attempt=made, window_steps=1, micro_batch_size=64,
                    memory=(),
                )  # fmt: skip
                seen = seen.after(trained)
            seen = seen.after(leak)
            decision = decide(ended(Cause.LEAK), seen, limits)
            seen = seen.after(decision_made(made, ended(Cause.LEAK), decision))
            if isinstance(decision, Fail):
                assert "can checkpoints be written?" in decision.reason
                break
        assert made == (50 if saved else allowed + 2)
