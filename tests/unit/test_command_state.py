"""A run of a command as those who watch it see it: nothing is claimed of its steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

import scenarios
from oomrun.cli.frame import History, frame
from oomrun.core import events as ev
from oomrun.core import status, words
from oomrun.core.state import JobState
from oomrun.metrics import catalogue

SMALLER = scenarios.smaller_plan()
OOM = ev.OomOccurred(
    at=scenarios.START + 8, attempt=1, rank=0, device="cpu:0", kind="device",
    phase="unknown", recovery="restart", micro_batch_size=256, step=0,
    message="CUDA out of memory",
)  # fmt: skip


def events() -> Iterator[ev.Event]:
    at = scenarios.START
    yield ev.RunStarted(
        at=at, run_id="r", name="cmd", version="0", seed=1,
        mathematics={"program": {"command": ["a", "{micro_batch}"]}},
    )  # fmt: skip
    for attempt, plan in ((1, scenarios.PLAN), (2, SMALLER)):
        yield ev.AttemptStarted(at=at + 1, attempt=attempt, plan=plan, pids=(7,))
        yield ev.WorkerReady(
            at=at + 2, attempt=attempt, rank=0, pid=8, tensorflow="", keras="",
            start_s=0.1,
        )  # fmt: skip
        yield ev.PhaseChanged(at=at + 2, attempt=attempt, phase="training")
        if attempt == 1:
            yield OOM
            yield ev.AttemptEnded(
                at=at + 9, attempt=1, cause="device_oom", summary="s", exit_code=1
            )
            yield ev.DecisionMade(
                at=at + 9, attempt=1, action="restart", cause="oom", reason="smaller",
                micro_batch_size=64,
            )  # fmt: skip


def states() -> Iterator[tuple[ev.Event, JobState]]:
    state = JobState()
    for event in events():
        state = state.after(event)
        yield event, state


def samples(state: JobState) -> dict[str, float]:
    """Every sample that has no labels but the run's."""
    registry = CollectorRegistry()
    registry.register(catalogue.JobStateCollector(lambda: [state]))
    return {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if set(sample.labels) == {"run"}
    }


def test_one_oom_is_counted_once() -> None:
    *_, (_, last) = states()
    assert last.oom_events == 1
    assert last.micro_batch_failed == 256
    assert last.restarts["oom"] == 1


def test_status_says_nothing_of_steps() -> None:
    *_, (_, last) = states()
    told = status.status_json(last)
    assert (told["state"], told["global_batch_size"]) == ("training", 256)
    assert [told[key] for key in ("step", "samples", "epoch", "loss")] == [None] * 4
    assert told["devices"][0]["micro_batch_size"] == 64


def test_metrics_have_no_zeros_for_what_is_not_known() -> None:
    for event, state in states():
        found = samples(state)
        for name in ("step", "epoch", "steps_total", "samples_total", "loss"):
            assert f"oomrun_{name}" not in found, event
        assert "oomrun_step_duration_seconds_count" not in found
        if state.attempt:
            expected = 256 if state.attempt == 1 and state.restarts["oom"] == 0 else 64
            assert found["oomrun_micro_batch_size"] == expected
    assert found["oomrun_workers_alive"] == 1


@pytest.mark.parametrize("width", [40, 100])
def test_the_live_view_shows_no_progress(width: int) -> None:
    history = History()
    for event, state in states():
        history.add(state, event)
        lines = frame(state, history, width=width, height=30, now=scenarios.START + 9)
        text = "\n".join(line.plain for line in lines)
        assert "epoch" not in text
        assert "loss" not in text
        assert "step" not in text
    assert "progress is in the program's own output" in text
    assert "micro-batch 64" in text


def test_words() -> None:
    said = [words.describe(event, state) for event, state in states()]
    assert "the program runs (pid 8)" in said
    assert (
        "out of memory: cpu:0 at micro-batch 256; the worker is started again "
        "(see attempts/0001/oom-1.txt)"
    ) in said
