"""Measuring what a training needs, and leaving before its first step.

Covers: the worker's part of ``oomrun plan --measure``. It tries sizes as a training
would (``probing.py``), and one also where a training would try none, so that the peak
is one that was seen. Does not cover: reporting what the memory is used for
(``announcing.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from oomrun.core import batch, breakdown
from oomrun.core.memory import MemoryModel
from oomrun.worker import announcing, devices
from oomrun.worker.probing import Found, Prober
from oomrun.worker.recovery import MicroBatches
from oomrun.worker.session import Session

__all__ = ["leave_unmeasured", "measure"]

# Each takes 0.05 to 0.6 s.
_GRAPH_SIZES = 6


def leave_unmeasured(session: Session, why: str) -> NoReturn:
    """Leaves where the training that would begin cannot be measured."""
    session.note(
        "not-measured",
        f"{why}, of which no steps are tried: nothing was measured. A run of it plans "
        "with what its steps take",
    )
    session.leave_measured()


def measure(
    session: Session,
    prober: Prober,
    model: Any,
    data: Any,
    samples: int,
    may_cut: Callable[[], bool],
) -> NoReturn:
    """Finds the micro-batch on ``data``, reports it with its peak, and leaves.

    Args:
        session: the training that would begin.
        prober: of its model.
        model: built and compiled.
        data: its first batch.
        samples: the batch's rows.
        may_cut: whether batches can be cut; asked only if they may have to be.
    """
    memory, *_ = devices.read_memory(session.launch.plan)
    if memory.peak_bytes is None:
        _from_graph(session, prober, model, data, samples)
    # Now as well: where nothing fits, it says why.
    announcing.state_measured(session, model, data, samples, prober.graph.peaks)
    planned = None
    if session.micro_batches.probes:
        planned = prober.settle(data, samples, may_cut, at_least_one=True)
    found = _tried(session, prober, planned, data, samples, may_cut)
    prober.graph.look(data, [found.size, max(1, found.size // 2)])
    announcing.state_measured(session, model, data, samples, prober.graph.peaks)
    announcing.micro_batch_planned(
        session, found.size, samples, found.reason, found.peak
    )
    session.leave_measured()


def _from_graph(
    session: Session, prober: Prober, model: Any, data: Any, samples: int
) -> NoReturn:
    """For a device that counts nothing, where a trial would tell nothing."""
    rows = [samples >> times for times in range(_GRAPH_SIZES)]
    prober.graph.look(data, [size for size in rows if size])
    seen = announcing.state_measured(session, model, data, samples, prober.graph.peaks)
    size = session.micro_batches.size(samples)
    reason = f"micro-batch {size} of {samples}: the device has no limit"
    peak = breakdown.known_from_graph(seen).predict(size)
    announcing.micro_batch_planned(session, size, samples, reason, peak)
    session.leave_measured()


def _tried(
    session: Session,
    prober: Prober,
    planned: Found | None,
    data: Any,
    samples: int,
    may_cut: Callable[[], bool],
) -> Found:
    """``planned``, or what a training would come to from there on by failing."""
    sizes = session.micro_batches
    size = planned.size if planned else sizes.size(samples)
    if size < samples and not may_cut():
        size = samples
    below = any(size <= ran for ran in sizes.measured)
    if planned is not None and planned.size == size and below and _may_run(size, sizes):
        return planned  # as good as tried, where it was not
    while size not in sizes.measured:
        if _may_run(size, sizes):
            prober.attempt(data, samples, size)
        if size not in sizes.measured:
            size = _smaller(session, size, samples, may_cut)
    passes = batch.accumulation_steps(samples, size)
    reason = f"micro-batch {size} x {passes} (global {samples}), the first that ran"
    return Found(size, reason, MemoryModel(measured=sizes.measured).predict(size))


def _may_run(size: int, sizes: MicroBatches) -> bool:
    return sizes.failed is None or size < sizes.failed


def _smaller(
    session: Session, size: int, samples: int, may_cut: Callable[[], bool]
) -> int:
    """The size to try after one that ran out of memory; leaves where there is none."""
    sizes, launch = session.micro_batches, session.launch
    if samples > 1 and not may_cut():
        sizes.report(size, "gradients", "", recovery="none")
        session.leave_for_restart()
    again = launch.in_process and launch.micro_batch_fixed is None
    smaller = batch.smaller_micro_batch(samples, size) if again else 0
    if not smaller:
        sizes.report(size, "gradients", "", recovery="restart")
        session.leave_for_restart()
    return smaller
