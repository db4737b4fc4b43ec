"""What can be changed beside the micro-batch to save memory, and which is next.

Covers: each lever's effect and cost, where it can help, the order of the job file, and
when one is taken back. Does not cover: pulling it (``oomrun.worker.pulling``,
``oomrun.environment``), what else follows a failure (``policy.py``).

A lever that is in force is part of the plan. What was known of sizes before it was
pulled says nothing any more: a sample needs another amount of memory now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomrun.core.causes import Cause
from oomrun.core.spec import IN_WORKERS, OPTIMIZERS
from oomrun.core.state import JobState

__all__ = [
    "FEWER_DEVICES", "LEVERS", "MICRO_BATCH", "Lever", "due", "for_state", "in_force",
    "in_words", "left", "not_tried", "to_leave_out", "to_take_back",
]  # fmt: skip

MICRO_BATCH = "micro_batch"
FEWER_DEVICES = "fewer_devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change that saves memory.

    Attributes:
        effect: what it does.
        cost: what that costs.
        changes_numbers: whether the trained weights come out otherwise by more than
            rounding in another order.
        host: whether it saves host memory, not a GPU's.
    """

    effect: str
    cost: str
    changes_numbers: bool = False
    host: bool = False


#: All but ``micro_batch``, which is not pulled once, but step by step.
LEVERS: Mapping[str, Lever] = {
    "allocator": Lever(
        effect="the GPU's memory is had from CUDA's own pool (cuda_malloc_async), "
        "which does not break into pieces",
        cost="with memory.mode growth only; steps may take longer",
    ),
    "recompute": Lever(
        effect="activations between groups of layers are kept, those within are "
        "computed again for the gradients",
        cost="up to a third more time a step; the numbers are the same",
    ),
    "mixed_precision": Lever(
        effect="layers compute in bfloat16, in half of the memory for activations; "
        "weights stay float32",
        cost="the numbers change: another model comes out",
        changes_numbers=True,
    ),
    "optimizer_adafactor": Lever(
        effect="models are compiled with Adafactor, which keeps the means of rows and "
        "columns of each weight; learning rate, clipping and decay stay",
        cost="the numbers change: another model comes out; what the optimizer before "
        "had gathered is left behind",
        changes_numbers=True,
    ),
    "optimizer_lion": Lever(
        effect="models are compiled with Lion, which keeps one number for each weight, "
        "half of what Adam keeps; learning rate, clipping and decay stay",
        cost="the numbers change: another model comes out; what the optimizer before "
        "had gathered is left behind",
        changes_numbers=True,
    ),
    "optimizer_sgd": Lever(
        effect="models are compiled with SGD without momentum, which keeps nothing; "
        "learning rate, clipping and decay stay",
        cost="the numbers change: another model comes out; what the optimizer before "
        "had gathered is left behind",
        changes_numbers=True,
    ),
    "xla_on": Lever(
        effect="XLA compiles the step and fuses operations, whose results in between "
        "are then never in memory",
        cost="compiling, again for each size of micro-batch; rounding differs",
    ),
    "xla_off": Lever(
        effect="XLA does not compile the step, and needs no buffers of its own",
        cost="steps may take longer; rounding differs",
    ),
    "host_pipeline": Lever(
        effect="tf.data and PyDatasets hold one batch ahead and make one at a time",
        cost="training may wait for data; the numbers are the same",
        host=True,
    ),
    # For a device each time, and never taken back: what is known of sizes stays.
    FEWER_DEVICES: Lever(
        effect="a device on which not even one sample fits is left out, and the "
        "others do its share",
        cost="a step takes longer by what it did; the numbers are the same",
        host=True,
    ),
}


def due(
    order: Sequence[str], state: JobState, plan: Mapping[str, Any] | None
) -> str | None:
    """The lever to pull before the micro-batch becomes smaller; None: none is.

    Args:
        order: ``recovery.levers``.
        state: the run so far.
        plan: the attempt's that is in question.
    """
    if MICRO_BATCH not in order:
        return None
    # Not even one sample: that is known after the micro-batch only.
    before = [n for n in order[: list(order).index(MICRO_BATCH)] if n != FEWER_DEVICES]
    return _first(before, state, plan, Cause.DEVICE_OOM)


def left(order: Sequence[str], state: JobState, cause: Cause) -> str | None:
    """The next lever that was not tried yet; None: none is left."""
    return _first(order, state, state.plan, cause)


def _first(
    order: Sequence[str], state: JobState, plan: Mapping[str, Any] | None, cause: Cause
) -> str | None:
    for name in order:
        known = name in LEVERS and name not in state.levers_tried
        if name == FEWER_DEVICES:
            known = to_leave_out(state, cause) is not None
        elif known:
            known = _may_help(name, plan or {}, cause) and not _refused(name, state)
        if known:
            return name
    return None


def for_state(order: Sequence[str], state: JobState) -> str | None:
    """The next lever that shrinks the model's own state, wherever it is listed."""
    return _first(
        [name for name in order if name in OPTIMIZERS],
        state,
        state.plan,
        Cause.DEVICE_OOM,
    )


def _refused(name: str, state: JobState) -> str:
    """Why a lever that replaces the optimizer cannot here; empty where it can."""
    if name not in OPTIMIZERS:
        return ""
    if (state.plan or {}).get("strategy", "single") != "single":
        return "it is for training on one device"
    if state.in_loop:
        return "a loop of oomrun.Loop calls its optimizer itself"
    smaller = OPTIMIZERS[OPTIMIZERS.index(name) :]
    if any(other in state.levers for other in smaller):
        return "an optimizer that keeps less is in force"
    return ""


def not_tried(order: Sequence[str], state: JobState) -> str:
    """Which of the levers listed cannot be pulled here, and why; empty: none."""
    kinds = {
        name: why
        for name in order
        if name not in state.levers_tried and (why := _refused(name, state))
    }
    return "".join(f". The lever {name} is not tried: {kinds[name]}" for name in kinds)


def to_leave_out(state: JobState, cause: Cause) -> str | None:
    """The device that the others go on without; None where there is none, or no other.

    Where host memory ran out it is one of those that have a worker each on that host:
    the last of them, as the first one writes and reports.
    """
    devices = [d for d in (state.plan or {}).get("devices", ()) if "id" in d]
    ids = [str(device["id"]) for device in devices]
    if len(ids) < 2:
        return None
    failed = min(state.failed_rank, len(ids) - 1)
    if cause is Cause.HOST_OOM:
        hosts = [device.get("host", 0) for device in devices]
        there = [n for n, host in enumerate(hosts) if host == hosts[failed]]
        apart = (state.plan or {}).get("strategy") in IN_WORKERS
        return ids[there[-1]] if apart and len(there) > 1 else None
    named = state.last_oom.device if state.last_oom is not None else ""
    return named if named in ids else ids[failed]


def _may_help(name: str, plan: Mapping[str, Any], cause: Cause) -> bool:
    devices = plan.get("devices")
    listed = devices if isinstance(devices, list | tuple) else ()
    kinds = {item.get("kind") for item in listed if isinstance(item, Mapping)}
    on_cpu = kinds == {"cpu"}
    if cause is Cause.HOST_OOM:
        return LEVERS[name].host
    if LEVERS[name].host:
        return on_cpu  # there the pipeline's memory is the device's
    if name == "allocator":
        return not on_cpu and plan.get("memory_mode") == "growth"
    return True


def to_take_back(state: JobState) -> str | None:
    """The lever that has made it worse: what had run before it runs out of memory.

    None where that is not known of the one that was pulled last.
    """
    oom = state.last_oom
    fresh = state.levers and state.attempt == state.lever_attempt
    if not fresh or oom is None or oom.attempt != state.attempt:
        return None
    failed, before = oom.micro_batch_size, state.failed_before_lever
    if failed is None or failed > state.ran_before_lever:
        return None
    # What had run and then failed may fail again.
    return state.levers[-1] if before is None or failed < before else None


def in_force(state: JobState) -> tuple[str, ...]:
    """All levers of a run: those of the job file, then those that it came to."""
    planned = (state.plan or {}).get("levers") or ()
    first = [lever for lever in planned if lever not in state.levers_tried]
    return tuple(dict.fromkeys((*first, *state.levers)))


def in_words(name: str) -> str:
    """``recompute (activations …; up to a third more time a step)``."""
    lever = LEVERS.get(name)
    return f"{name} ({lever.effect}; {lever.cost})" if lever else name
