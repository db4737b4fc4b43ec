"""The report of an exhaustion: what it says, when it is written, and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import scenarios
from oomrun.core import events as ev
from oomrun.core import oom_report
from oomrun.core.log_facts import script_line
from oomrun.core.state import JobState, replay
from oomrun.oom_reports import OomReports
from oomrun.rundir import RunDir

MIB = scenarios.MIB
EVENTS = scenarios.whole()
FIRST = next(n for n, e in enumerate(EVENTS) if isinstance(e, ev.OomOccurred))
MESSAGE = (
    "OOM when allocating tensor with shape[256,64,64,8] and type double on "
    "/job:localhost/replica:0/task:0/device:CPU:0 by allocator "
    "bfc_cpu_allocator_for_gpu"
)


def exhaustion(**fields: object) -> ev.OomOccurred:
    oom = EVENTS[FIRST]
    assert isinstance(oom, ev.OomOccurred)
    memory = ev.DeviceMemory(
        device=oom.device, in_use_bytes=50 * MIB, peak_bytes=580 * MIB,
        limit_bytes=600 * MIB,
    )  # fmt: skip
    known = {"message": MESSAGE, "memory": (memory,), **fields}
    return replace(oom, **known)  # type: ignore[arg-type]


def report(
    oom: ev.OomOccurred,
    followed: Sequence[ev.Event] = (),
    composition: ev.StateMeasured | None = None,
) -> str:
    state = replace(replay([*EVENTS[:FIRST], oom]), composition=composition)
    history = [event for event in EVENTS[:FIRST] if oom_report.is_history(event)]
    return oom_report.write(
        oom, state, history, followed, when="noon", log="rank-0.log"
    )


COMPOSITION = ev.StateMeasured(
    at=1.0, attempt=1, fit=1, global_batch_size=256, trained_bytes=20 * MIB,
    fixed_bytes=0, optimizer_bytes=40 * MIB, metrics_bytes=0, input_bytes=8 * MIB,
    rest_bytes=70 * MIB, graph_sizes=(128, 256), graph_peaks=(300 * MIB, 520 * MIB),
    graph_activations=(220 * MIB, 440 * MIB),
)  # fmt: skip


def test_it_says_what_was_asked_for_and_by_what() -> None:
    operation = "gradient_tape/net/conv_3/Conv2DBackpropFilter"
    text = report(exhaustion(operation=operation, location="train.py:12"))
    for line in (
        "asked for  64MiB: shape [256, 64, 64, 8] of double",
        f"operation  {operation}",
        "layer      conv_3",
        "script     train.py:12",
        "samples    micro-batch 256 x 1 (global 256)",
        "output     rank-0.log",
        "highest  580MiB",
        "A limit of 644MiB would have been enough for this allocation",
    ):
        assert line in text, text


def test_it_takes_the_memory_apart_where_that_is_known() -> None:
    planned = ev.MicroBatchPlanned(
        at=1.0, attempt=1, fit=1, micro_batch_size=256, global_batch_size=256,
        reason="", predicted_peak_bytes=560 * MIB, predicted_peak_high_bytes=610 * MIB,
    )  # fmt: skip
    oom = exhaustion()
    state = replay([*EVENTS[:FIRST], planned, oom])
    state = replace(state, composition=COMPOSITION)
    text = oom_report.write(oom, state, [planned], when="noon", log="x")
    assert "activations, temporary tensors  440MiB" in text
    assert "optimizer slots                 40MiB" in text
    assert "mixed_bfloat16') would save up to 220MiB" in text
    assert "Micro-batch 256 needs a limit of about" in text


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"kind": "host"}, "A smaller micro-batch does not help"),
        ({"phase": "evaluate"}, "a smaller batch, such as 128 samples"),
        ({"phase": "apply"}, "The optimizer keeps 40MiB"),
    ],
)
def test_the_advice_is_for_what_happened(
    fields: dict[str, object], advice: str
) -> None:
    assert advice in report(exhaustion(**fields), composition=COMPOSITION)


def test_a_size_that_had_run_before_is_told() -> None:
    oom = exhaustion()
    state = replay([*EVENTS[:FIRST], oom])
    state = replace(state, measured={256: 500 * MIB})
    text = oom_report.write(oom, state, [], when="noon", log="x")
    assert "Micro-batch 256 had run before, with 500MiB at most" in text


def test_what_is_not_known_is_left_out() -> None:
    oom = exhaustion(message="", memory=(), micro_batch_size=None, device="")
    text = oom_report.write(oom, JobState(), [], when="noon", log="x")
    assert "nothing is known of it" in text
    assert "None" not in text


def test_what_followed_is_added(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    reports, state = OomReports(run_dir, ()), JobState()
    seen = []
    for event in EVENTS:
        state = state.after(event)
        reports(state, event)
        seen.append([path.read_text() for path in sorted(tmp_path.rglob("oom-*.txt"))])
    assert "nothing yet" in seen[FIRST][0]
    first, second = seen[-1]
    assert "in process: " in first
    assert "256 -> 128" in first
    assert "restart: " in second
    assert "128 -> 64" in second
    assert "ran out at 256 in gradients" in second
    assert run_dir.oom_report(1, 1).read_text() == first


def test_a_supervisor_that_takes_over_goes_on_with_the_reports(tmp_path: Path) -> None:
    whole, halves = RunDir(tmp_path / "whole"), RunDir(tmp_path / "halves")
    for run_dir, cuts in ((whole, [0]), (halves, range(len(EVENTS)))):
        for cut in cuts:
            # Each of them sees one event more than the one before, or all of them.
            reports = OomReports(run_dir, EVENTS[:cut])
            for n in range(cut, len(EVENTS) if run_dir is whole else cut + 1):
                reports(replay(EVENTS[: n + 1]), EVENTS[n])
    told = [
        [path.read_text() for path in sorted(run_dir.path.rglob("oom-*.txt"))]
        for run_dir in (whole, halves)
    ]
    assert len(told[0]) == 2
    assert [text.replace("whole/", "") for text in told[0]] == [
        text.replace("halves/", "") for text in told[1]
    ]


def test_a_report_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "attempts").write_text("in the way")
    reports = OomReports(RunDir(tmp_path), ())
    for n, event in enumerate(EVENTS):
        reports(replay(EVENTS[: n + 1]), event)
    assert caplog.text.count("the report of an exhaustion is missing") == 1


def test_an_exhaustion_that_nobody_reported_has_a_report_too(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    ended = ev.AttemptEnded(
        at=9.0, attempt=1, cause="host_oom", exit_code=None, signal=9,
        summary="the kernel killed the worker: host memory ran out",
    )  # fmt: skip
    events = [*EVENTS[:FIRST], ended]
    reports = OomReports(run_dir, EVENTS[:FIRST])
    reports(replay(events), ended)
    text = run_dir.oom_report(1, 1).read_text()
    assert "Out of memory: host memory" in text
    assert ended.summary in text


def test_the_script_s_line_is_the_innermost_of_its_own() -> None:
    text = (
        'File "/home/a/train.py", line 8, in <module>\n'
        'File "/opt/lib/python3.11/site-packages/keras/trainer.py", line 9, in fit\n'
        'File "/home/a/layers.py", line 31, in call\n'
        'File "/opt/lib/python3.11/site-packages/keras/src/ops.py", line 2, in relu\n'
    )
    assert script_line(text) == "layers.py:31"
    assert script_line("no traceback") is None
