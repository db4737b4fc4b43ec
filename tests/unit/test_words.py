"""Every event has words for a person, on one line that cannot harm a terminal."""

from __future__ import annotations

import pytest

import scenarios
from oomrun.core import events as ev
from oomrun.core import words
from oomrun.core.state import JobState


def said(events: list[ev.Event]) -> list[str]:
    """What a person is told, in order."""
    lines = (words.describe(event, state) for state, event in scenarios.states(events))
    return [line for line in lines if line is not None]


def test_a_run_tells_its_story() -> None:
    story = said(scenarios.whole())
    for line in (
        "run digits started (oomrun 0.1.0)",
        "attempt 1: single on cpu:0 (limit 600MiB), micro-batch 256 x 1 (global 256)",
        "worker 0 is ready after 2.9s (TensorFlow 2.21.0, Keras 3.15.1)",
        "fit 1: 5 epochs of 20 steps, micro-batch 256 x 1 (global 256)",
        "out of memory: cpu:0 in gradients at micro-batch 256, step 0; "
        "trying again with a smaller micro-batch (see attempts/0001/oom-1.txt)",
        "cpu:0 ran out of memory in gradients at micro-batch 256: "
        "micro-batch 256 -> 128 x 2 (global 256)",
        "epoch 1/5, step 5/20, loss 1.333, 200ms/step, 1280 samples/s, "
        "micro-batch 128 x 2 (global 256)",
        "checkpoint at step 40: 12MiB in 300ms (every 40 steps)",
        "attempt 1 ended: cpu:0 ran out of memory in apply: micro-batch 128 -> 64 x 4 "
        "(global 256); restarting (see attempts/0001/oom-2.txt)",
        "fit 1: 5 epochs of 20 steps, from epoch 3, micro-batch 64 x 4 (global 256)",
        "training goes on from step-00000040 at step 40; 5 steps are trained again",
        "fit 1 completed at step 100, 25600 samples",
        "run digits completed: the script finished (exit code 0)",
    ):
        assert line in story


def test_a_decision_is_told_once() -> None:
    story = said(scenarios.whole())
    assert sum("ran out of memory in apply" in line for line in story) == 1
    assert sum("the script finished" in line for line in story) == 1


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            ev.Restored(at=0, attempt=1, name="", fit=1, step=0, samples=0),
            "training starts at the beginning",
        ),
        (
            ev.Restored(
                at=0, attempt=2, name="", fit=1, step=0, samples=0, lost_steps=1
            ),
            "training starts at the beginning; 1 step is trained again",
        ),
        (
            ev.FitEnded(
                at=0, attempt=2, fit=1, step=9, samples=9, epoch=1, replayed=True
            ),
            "fit 1 was completed before; its result is used",
        ),
        (
            ev.CheckpointFailed(at=0, attempt=1, step=7, reason="no space left"),
            "the checkpoint at step 7 could not be written, training goes on: "
            "no space left",
        ),
        (
            ev.DecisionMade(
                at=0, attempt=3, action="restart", cause="crash", reason="SIGSEGV",
                delay_s=2.0,
            ),
            "attempt 3 ended: SIGSEGV; restarting in 2s",
        ),
        (
            ev.ScriptEnded(
                at=0, attempt=1, rank=0, outcome="raised", exit_code=1,
                exception="ValueError", message="bad\nshape", location="train.py:9",
            ),
            "the script raised ValueError at train.py:9: bad shape",
        ),
        (
            ev.LeakFound(
                at=0, attempt=1, device="cpu:0", step=80, bytes_per_step=2.0**20,
                grown_bytes=80 * 2**20, budget_bytes=2**27, steps_left=9,
            ),
            "memory leak: 80MiB more are in use on cpu:0 between steps than when the "
            "fit began, 1MiB a step; it would run out in about 9 steps, so the worker "
            "saves and is started again",
        ),
        (
            ev.LeakFound(
                at=0, attempt=1, device="cpu:0", step=8, bytes_per_step=0.0,
                grown_bytes=80 * 2**20, budget_bytes=2**27, steps_left=None,
            ),
            "memory leak: 80MiB more are in use on cpu:0 between steps than when the "
            "fit began; the worker saves and is started again",
        ),
        (
            ev.LeakFound(
                at=0, attempt=1, device="host", step=80, bytes_per_step=2.0**20,
                grown_bytes=80 * 2**20, budget_bytes=2**27, steps_left=9,
            ),
            "memory leak: 80MiB more are in use of the host between steps than when "
            "the fit began, 1MiB a step; it would run out in about 9 steps, so the "
            "worker saves and is started again",
        ),
        (ev.PhaseChanged(at=0, attempt=1, phase="evaluating"), None),
        (ev.Unknown(at=0, original={"type": "from_the_future"}), None),
    ],
)  # fmt: skip
def test_words(event: ev.Event, line: str | None) -> None:
    assert words.describe(event, JobState().after(event)) == line


def test_text_from_outside_cannot_move_the_cursor_or_flood_the_line() -> None:
    note = ev.Noted(at=0, attempt=1, code="x", text="a\x1b[2J\u202eb\r\n" + "c" * 900)
    line = words.describe(note, JobState())
    assert line is not None
    assert line.startswith("note: a [2J b c")
    assert line.isprintable()
    assert len(line) <= 500


def test_a_micro_batch_larger_than_the_batch_is_the_batch() -> None:
    assert words.cut(10, 64) == "micro-batch 10 x 1 (global 10)"


def test_every_event_has_a_level() -> None:
    levels = {words.level(event) for event in scenarios.whole()}
    assert levels == {"info", "warning"}
    failed = ev.RunEnded(at=0, state="failed", exit_code=1, reason="")
    assert words.level(failed) == "error"
