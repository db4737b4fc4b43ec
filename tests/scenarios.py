"""A run as its events: starts, runs out of memory twice, restarts, completes.

Covers: event lists that tests of status, metrics and views share. Does not cover:
checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomrun.core import events as ev
from oomrun.core.state import JobState

MIB = 2**20
START = 1_700_000_000.0

PLAN: dict[str, Any] = {
    "strategy": "single",
    "strategy_reason": "one device",
    "global_batch_size": 256,
    "memory_mode": "limit",
    "devices": [
        {
            "id": "cpu:0",
            "kind": "cpu",
            "limit_bytes": 600 * MIB,
            "budget_bytes": 552 * MIB,
            "share": 256,
            "micro_batch_size": 256,
            "accumulation_steps": 1,
            "predicted_peak_bytes": None,
            "predicted_peak_high_bytes": None,
        }
    ],
    "notes": ["the peak is not known until something ran"],
}


def smaller_plan() -> dict[str, object]:
    """The plan after the restart."""
    device = {
        **PLAN["devices"][0],
        "micro_batch_size": 64,
        "accumulation_steps": 4,
        "predicted_peak_bytes": 235 * MIB,
        "predicted_peak_high_bytes": 293 * MIB,
    }
    return {**PLAN, "devices": [device], "notes": []}


def memory(in_use: int, peak: int) -> tuple[ev.DeviceMemory, ...]:
    """One CPU device, in MiB."""
    return (
        ev.DeviceMemory(
            device="cpu:0",
            in_use_bytes=in_use * MIB,
            peak_bytes=peak * MIB,
            limit_bytes=600 * MIB,
        ),
    )


def progressed(at: float, step: int, **changes: object) -> ev.Progressed:
    """Step ``step`` of 5 epochs of 20 steps."""
    settings: dict[str, object] = {
        "at": START + at,
        "attempt": 1,
        "fit": 1,
        "step": step,
        "samples": step * 256,
        "epoch": (step - 1) // 20 + 1,
        "step_in_epoch": (step - 1) % 20 + 1,
        "loss": 2.0 / (1 + step / 10),
        "window_steps": 5,
        "step_s": 0.2,
        "global_batch_size": 256,
        "micro_batch_size": 128,
        "memory": memory(150, 410),
    }
    return ev.Progressed(**{**settings, **changes})  # type: ignore[arg-type]


def oom(
    at: float, recovery: str = "in_process", size: int = 256, step: int = 0
) -> ev.OomOccurred:
    """Memory ran out: in the gradients, or in apply where nothing else is left."""
    return ev.OomOccurred(
        at=START + at,
        attempt=1,
        rank=0,
        device="cpu:0",
        kind="device",
        phase="gradients" if recovery == "in_process" else "apply",
        recovery=recovery,
        micro_batch_size=size,
        step=step,
        message="OOM when allocating tensor with shape[256,62,62,32]",
        memory=memory(150, 590),
    )


def state_measured(**changes: Any) -> ev.StateMeasured:
    """A model of 10 MiB with Adam, on batches of 64 samples of 1 MiB."""
    known: dict[str, Any] = {
        "at": START + 4,
        "attempt": 1,
        "fit": 1,
        "global_batch_size": 64,
        "trained_bytes": 10 * MIB,
        "fixed_bytes": 2 * MIB,
        "optimizer_bytes": 20 * MIB,
        "metrics_bytes": 1 * MIB,
        "input_bytes": 64 * MIB,
        "rest_bytes": 100 * MIB,
        "graph_sizes": (64, 16),
        "graph_peaks": (394 * MIB, 142 * MIB),
        "graph_activations": (320 * MIB, 80 * MIB),
    }
    return ev.StateMeasured(**{**known, **changes})


def opening() -> list[ev.Event]:
    """Up to the first step that trains, after an OOM that needed no restart."""
    return [
        ev.RunStarted(
            at=START, run_id="r-1", name="digits", version="0.1.0", seed=1,
            mathematics={},
        ),
        ev.AttemptStarted(at=START + 0.1, attempt=1, plan=PLAN, pids=(4242,)),
        ev.WorkerReady(
            at=START + 3, attempt=1, rank=0, pid=4242, tensorflow="2.21.0",
            keras="3.15.1", start_s=2.9,
        ),
        ev.FitStarted(
            at=START + 3.5, attempt=1, fit=1, epochs=5, initial_epoch=0,
            global_batch_size=256, micro_batch_size=256, steps_per_epoch=20,
            state_bytes=60 * MIB,
        ),
        oom(4),
        ev.MicroBatchChanged(
            at=START + 4.1, attempt=1, old=256, new=128, phase="gradients",
            reason="cpu:0 ran out of memory in gradients at micro-batch 256: "
            "micro-batch 256 -> 128 x 2 (global 256)",
        ),
        progressed(5, 5),
    ]  # fmt: skip


def middle() -> list[ev.Event]:
    """A checkpoint, an OOM that needs a restart, and the restart."""
    return [
        *(progressed(5 + step / 5, step) for step in range(10, 41, 5)),
        ev.CheckpointSaved(
            at=START + 14, attempt=1, name="step-00000040", step=40, samples=10240,
            epoch=2, size_bytes=12 * MIB, duration_s=0.3, blocked_s=0.05,
            reason="every 40 steps",
        ),
        progressed(15, 45),
        oom(16, recovery="restart", size=128, step=45),
        ev.AttemptEnded(
            at=START + 16.5, attempt=1, cause="device_oom",
            summary="cpu:0 ran out of memory in apply", exit_code=1,
        ),
        ev.DecisionMade(
            at=START + 16.5, attempt=1, action="restart", cause="oom",
            reason="cpu:0 ran out of memory in apply: micro-batch 128 -> 64 x 4 "
            "(global 256)",
            micro_batch_size=64,
        ),
        ev.AttemptStarted(
            at=START + 16.6, attempt=2, plan=smaller_plan(), pids=(4343,)
        ),
        ev.WorkerReady(
            at=START + 19, attempt=2, rank=0, pid=4343, tensorflow="2.21.0",
            keras="3.15.1", start_s=2.4,
        ),
        ev.FitStarted(
            at=START + 19.5, attempt=2, fit=1, epochs=5, initial_epoch=2,
            global_batch_size=256, micro_batch_size=64, steps_per_epoch=20,
        ),
        ev.Restored(
            at=START + 19.5, attempt=2, name="step-00000040", fit=1, step=40,
            samples=10240, lost_steps=5,
        ),
    ]  # fmt: skip


def closing() -> list[ev.Event]:
    """From the checkpoint to the end."""
    return [
        *(
            progressed(
                20 + step / 5, step, attempt=2, micro_batch_size=64,
                memory=memory(150, 260),
            )
            for step in range(45, 101, 5)
        ),
        ev.FitEnded(
            at=START + 41, attempt=2, fit=1, step=100, samples=25600, epoch=5
        ),
        ev.ScriptEnded(
            at=START + 41.1, attempt=2, rank=0, outcome="finished", exit_code=0
        ),
        ev.AttemptEnded(
            at=START + 41.2, attempt=2, cause="finished",
            summary="the script finished", exit_code=0,
        ),
        ev.DecisionMade(
            at=START + 41.2, attempt=2, action="finish", cause="finished",
            reason="the script finished",
        ),
        ev.RunEnded(
            at=START + 41.3, state="completed", exit_code=0,
            reason="the script finished",
        ),
    ]  # fmt: skip


def whole() -> list[ev.Event]:
    """The run from its start to its end."""
    return [*opening(), *middle(), *closing()]


def states(events: list[ev.Event]) -> Iterator[tuple[JobState, ev.Event]]:
    """Every event with the state after it, as observers get them."""
    state = JobState()
    for event in events:
        state = state.after(event)
        yield state, event
