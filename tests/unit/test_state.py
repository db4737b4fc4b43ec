"""The state is the journal summed up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from oomrun.core import events as ev
from oomrun.core.state import JobState, replay


def started(seed: int = 1, **fields: Any) -> ev.RunStarted:
    body = {"run_id": "r", "name": "n", "version": "0", "mathematics": {}, **fields}
    return ev.RunStarted(at=1.0, seed=seed, **body)


def attempt(number: int = 1, limit: int | None = 100) -> ev.AttemptStarted:
    device = {"id": "cpu:0", "kind": "cpu", "limit_bytes": limit}
    plan = {"global_batch_size": 64, "devices": [device]}
    return ev.AttemptStarted(at=2.0, attempt=number, plan=plan, pids=(7,))


def progress(step: int = 1, micro: int = 64, peak: int | None = None) -> ev.Progressed:
    memory = (ev.DeviceMemory(device="cpu:0", peak_bytes=peak),)
    return ev.Progressed(
        at=3.0, attempt=1, fit=1, step=step, samples=step * 64, epoch=1,
        step_in_epoch=step, loss=0.5, window_steps=1, step_s=0.1,
        global_batch_size=64, micro_batch_size=micro, memory=memory,
    )  # fmt: skip


def oom(micro: int | None = 64, phase: str = "gradients") -> ev.OomOccurred:
    return ev.OomOccurred(
        at=4.0, attempt=1, rank=0, device="cpu:0", kind="device", phase=phase,
        recovery="restart", micro_batch_size=micro, step=1, message="",
    )  # fmt: skip


def decided(action: str, cause: str, micro: int | None = None) -> ev.DecisionMade:
    return ev.DecisionMade(
        at=5.0, attempt=1, action=action, cause=cause, reason=f"since {cause}",
        micro_batch_size=micro,
    )  # fmt: skip


ENDED = ev.RunEnded(at=9.0, state="failed", exit_code=1, reason="it broke")


def test_a_run_from_start_to_end() -> None:
    state = replay([started(), attempt(), progress(3, peak=70)])
    assert (state.state, state.attempt, state.attempt_open) == ("training", 1, True)
    assert (state.step, state.samples, state.peaks) == (3, 192, {"cpu:0": 70})
    assert state.measured == {64: 70}
    state = state.after(ENDED)
    assert (state.state, state.exit_code, state.terminal) == ("failed", 1, True)


def test_a_new_try_has_new_budgets_and_old_knowledge() -> None:
    state = replay([started(), attempt(), oom(), decided("restart", "oom", 32), ENDED])
    assert state.budget_used["oom"] == 1
    again = state.after(started())
    assert again.budget_used["oom"] == 0
    assert again.restarts["oom"] == 1
    assert again.micro_batch_limit == 32
    assert again.exit_code is None


@pytest.mark.parametrize("action", ["finish", "fail", "stop"])
def test_only_restarts_count_as_restarts(action: str) -> None:
    state = replay([started(), attempt(), decided(action, "crash")])
    assert sum(state.restarts.values()) == 0
    assert state.last_decision == "since crash"


def test_crashes_are_forgiven_once_training_moved() -> None:
    state = replay([started(), progress(1), decided("restart", "crash")])
    assert state.after(progress(1)).budget_used["crash"] == 1
    assert state.after(progress(2)).budget_used["crash"] == 0


def test_what_was_lost_once_is_not_lost_again() -> None:
    """An attempt came to step 10, and the next one from a checkpoint at 5 to 7."""

    def restored(lost: int) -> ev.Restored:
        return ev.Restored(
            at=4.0, attempt=2, name="a", fit=1, step=5, samples=320, lost_steps=lost
        )

    state = replay([started(), attempt(), progress(10)])
    assert state.reached_step == 10
    state = state.after(attempt(2))  # nothing is lost until a checkpoint is taken
    assert state.reached_step == 10
    state = state.after(restored(5))
    assert state.reached_step == 5
    state = state.after(progress(7)).after(attempt(3)).after(restored(2))
    assert (state.reached_step, state.lost_steps) == (5, 7)
    assert state.last_training_step == 10


def test_ooms_are_counted_and_the_smallest_failure_is_kept() -> None:
    state = replay([started(), attempt(), oom(64), oom(32), oom(48), oom(None)])
    assert state.oom_events == 4
    assert state.micro_batch_failed == 32


@pytest.mark.parametrize("phase", ["evaluate", "predict", "checkpoint"])
def test_an_oom_elsewhere_says_nothing_of_the_training_batch(phase: str) -> None:
    assert replay([attempt(), oom(8, phase)]).micro_batch_failed is None


def test_a_failure_under_a_lower_limit_is_forgotten() -> None:
    state = replay([attempt(1, limit=100), oom(8)])
    assert (state.micro_batch_failed, state.limit_when_failed_bytes) == (8, 100)
    state = replay([attempt(1, limit=100), oom(8), attempt(2, limit=200), oom(32)])
    assert (state.micro_batch_failed, state.limit_when_failed_bytes) == (32, 200)
    state = replay([attempt(1, limit=100), oom(8), attempt(2, limit=105), oom(32)])
    assert state.micro_batch_failed == 8


def test_a_takeover_opens_a_stopped_run_again() -> None:
    stopped = replace(ENDED, state="preempted", exit_code=75)
    state = replay([started(), attempt(), progress(4), stopped])
    state = state.after(ev.RunResumed(at=10.0, pid=1, reason="it was stopped"))
    assert (state.state, state.exit_code, state.step) == ("starting", None, 4)
    assert not state.attempt_open


def test_a_plan_of_any_form_is_borne() -> None:
    for plan in ({}, {"devices": 3}, {"devices": [1]}, {"global_batch_size": "x"}):
        event = ev.AttemptStarted(at=1.0, attempt=1, plan=plan)
        assert replay([event, oom()]).global_batch_size is None


def test_notes_are_kept_once() -> None:
    note = ev.Noted(at=1.0, attempt=1, code="bn", text="BatchNorm")
    assert replay([note, note]).notes == (("bn", "BatchNorm"),)


def test_the_first_state_is_pending() -> None:
    assert JobState().state == "pending"
    assert replay([]) == JobState()


@pytest.mark.parametrize("recovery", ["restart", "none"])
def test_the_end_of_an_attempt_adds_nothing_to_an_oom_that_was_told(
    recovery: str,
) -> None:
    """A batch that cannot be cut was trained again at ever smaller sizes."""
    told = replace(oom(), recovery=recovery)
    ended = ev.AttemptEnded(
        at=5.0, attempt=1, cause="device_oom", summary="", exit_code=70
    )
    state = replay([started(), attempt(), told, ended])
    assert (state.oom_events, state.last_oom) == (1, told)


def test_what_memory_is_made_of_is_known_until_another_model_comes() -> None:
    def fit(number: int, key: str) -> ev.FitStarted:
        return ev.FitStarted(
            at=3.0, attempt=1, fit=number, epochs=1, initial_epoch=0,
            global_batch_size=8, micro_batch_size=8, steps_per_epoch=1,
            profile_key=key,
        )  # fmt: skip

    seen = ev.StateMeasured(
        at=4.0, attempt=1, fit=1, global_batch_size=8, trained_bytes=1, fixed_bytes=2,
        optimizer_bytes=3, metrics_bytes=4, input_bytes=5,
    )  # fmt: skip
    state = replay([started(), attempt(), fit(1, "a"), seen])
    assert state.composition == seen
    assert state.after(fit(2, "a")).composition == seen
    assert state.after(fit(2, "b")).composition is None


def leak(grown: int, steps_left: int = 5) -> ev.LeakFound:
    return ev.LeakFound(
        at=0, attempt=1, device="cpu:0", step=9, bytes_per_step=1.0,
        grown_bytes=grown, budget_bytes=100, steps_left=steps_left,
    )  # fmt: skip


def test_what_a_leak_took_is_no_step_s_need() -> None:
    seen = [started(), attempt(), progress(micro=64, peak=90), leak(grown=60)]
    assert replay(seen).measured == {64: 30}
    ran_out = [*seen[:3], oom(64), leak(grown=60, steps_left=0)]
    state = replay(ran_out)
    assert (state.measured, state.micro_batch_failed) == ({64: 30}, None)
    assert replay([*ran_out, attempt(2)]).last_leak is None


def test_nor_is_what_it_takes_in_later_attempts() -> None:
    def steps(in_use: int, peak: int, device: str = "cpu:0") -> ev.Progressed:
        read = ev.DeviceMemory(device=device, in_use_bytes=in_use, peak_bytes=peak)
        return replace(progress(micro=64), memory=(read,))

    leaked = replay([started(), attempt(), steps(80, 90), leak(grown=60)])
    assert (leaked.measured, leaked.at_rest) == ({64: 30}, {"cpu:0": 20})
    again = leaked.after(attempt(2))
    for event, most in (
        (steps(20, 31), 31),
        (steps(70, 80), 31),
        (steps(70, 95), 45),
        # Less is in use than before: nothing is kept.
        (steps(10, 50), 50),
        (steps(70, 71, "cpu:1"), 71),
    ):
        again = again.after(event)
        assert again.measured == {64: most}
    # A second leak keeps the lower level of the two.
    assert again.after(steps(80, 90)).after(leak(grown=70)).at_rest == {"cpu:0": 10}
    assert again.after(steps(80, 90)).after(leak(grown=40)).at_rest == {"cpu:0": 20}


def test_what_the_host_lost_was_no_device_s() -> None:
    on_host = replace(leak(grown=60), device="host")
    state = replay([started(), attempt(), progress(micro=64, peak=90), on_host])
    assert (state.measured, state.last_leak) == ({64: 90}, on_host)


def test_growing_back_forgets_what_failed() -> None:
    change = ev.MicroBatchChanged(
        at=5.0, attempt=1, old=64, new=32, phase="gradients", reason="less"
    )
    shrunk = replay([started(), attempt(), progress(), oom(), change])
    assert (shrunk.micro_batch_failed, shrunk.micro_batch_limit) == (64, 32)
    back = replay(
        [
            started(),
            attempt(),
            progress(),
            oom(),
            change,
            replace(change, old=32, new=64),
        ]
    )
    assert (back.micro_batch_failed, back.micro_batch_limit) == (None, 64)
    assert back.in_process_recoveries == shrunk.in_process_recoveries == 1


@pytest.mark.parametrize(
    "event",
    [
        lambda n: ev.CheckpointFailed(at=1.0, attempt=1, step=n, reason=f"{n}: full"),
        lambda n: ev.CheckpointRejected(at=1.0, attempt=1, name=f"{n}", reason="torn"),
        lambda n: ev.Noted(at=1.0, attempt=1, code="c", text=f"{n}"),
    ],
)
def test_a_night_of_trouble_leaves_no_night_of_notes(
    event: Callable[[int], ev.Event],
) -> None:
    state = replay(map(event, range(1000)))
    assert 0 < len(state.notes) < 100
    other = ev.Noted(at=1.0, attempt=1, code="other", text="seen")
    failed = ev.CheckpointFailed(at=1.0, attempt=1, step=7, reason="the last")
    after = replay([other, *map(event, range(1000)), failed])
    assert ("other", "seen") in after.notes
    assert after.notes[-1] == ("checkpoint", "the last")
