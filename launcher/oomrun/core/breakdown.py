"""What a predicted peak is made of: bytes by kind, which add up to it.

Covers: ``explain``, a function of what a worker has measured of its model
(``events.StateMeasured``) and of the prediction; its JSON form. Does not cover: the
prediction itself (``memory.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from oomrun.core.events import StateMeasured
from oomrun.core.memory import MemoryModel, Peak, peak_of

__all__ = [
    "KINDS", "Breakdown", "Parts", "explain", "known_from_graph", "of_device",
    "to_json",
]  # fmt: skip


#: The kinds in the words of people.
KINDS = {
    "trained": "weights, trained",
    "fixed": "weights, not trained",
    "optimizer": "optimizer slots",
    "metrics": "metrics",
    "input": "batch",
    "script": "other, in use between steps",
    "gradients": "gradients",
    "activations": "activations, temporary tensors",
    "surplus": "workspace, copies, order",
}


class Predicted(Protocol):
    """A device as a plan or a status tells it, in bytes."""

    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def predicted_peak_bytes(self) -> int | None: ...
    @property
    def predicted_peak_high_bytes(self) -> int | None: ...
    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def budget_bytes(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The kinds of memory in a peak, in bytes.

    Attributes:
        trained: weights that are trained.
        fixed: those that are not, statistics and seeds among them.
        optimizer: its slots.
        metrics: state of metrics and losses.
        input: one batch, all samples of it.
        script: what else is in use between steps: the script's own tensors, batches
            that were fetched ahead, TensorFlow's.
        gradients: one of each trained weight.
        activations: of one micro-batch, with temporary tensors, by the step's graph.
        surplus: what a real step takes above that: workspace of libraries, tensors
            that are kept for longer than the graph asks for, copies.
    """

    trained: int = 0
    fixed: int = 0
    optimizer: int = 0
    metrics: int = 0
    input: int = 0
    script: int = 0
    gradients: int = 0
    activations: int = 0
    surplus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A predicted peak and all that lies between it and the device's limit.

    Attributes:
        micro_batch_size: samples a pass.
        parts: they add up to ``peak_bytes``.
        bytes_per_sample: what one sample more of a pass adds to the activations, by
            the graph; None where it says nothing.
        peak_bytes: the most likely peak.
        margin_bytes: from there to the upper end of the prediction.
        unused_bytes: from there to the budget; negative where it is above.
        headroom_bytes: from the budget to the limit. The three and the peak add up to
            the limit; the last two are None where there is none.
    """

    micro_batch_size: int
    parts: Parts
    bytes_per_sample: int | None
    peak_bytes: int
    margin_bytes: int
    unused_bytes: int | None = None
    headroom_bytes: int | None = None


def of_device(seen: StateMeasured | None, device: Predicted) -> Breakdown | None:
    """What a device's predicted peak is made of, where that is known."""
    size = device.micro_batch_size
    peak = peak_of(device.predicted_peak_bytes, device.predicted_peak_high_bytes)
    if seen is None or size is None or peak is None:
        return None
    return explain(
        seen,
        size,
        peak,
        limit_bytes=device.limit_bytes,
        budget_bytes=device.budget_bytes,
    )


def explain(
    seen: StateMeasured,
    micro_batch_size: int,
    peak: Peak,
    *,
    limit_bytes: int | None = None,
    budget_bytes: int | None = None,
) -> Breakdown:
    """Takes a predicted peak apart.

    What is surest is taken first: where the kinds together are more than the peak that
    was measured, it is the graph's figure that is cut down, and what is left in the end
    is the surplus.

    Args:
        seen: what the worker has measured.
        micro_batch_size: samples a pass.
        peak: the prediction for that size.
        limit_bytes: of the device; None without one.
        budget_bytes: what of it is planned into.
    """
    model = {
        "trained": seen.trained_bytes,
        "fixed": seen.fixed_bytes,
        "optimizer": seen.optimizer_bytes,
        "metrics": seen.metrics_bytes,
        "input": seen.input_bytes,
    }
    known = sum(max(0, count) for count in model.values())
    graph = zip(seen.graph_sizes, seen.graph_activations, strict=False)
    activations, each = _line(dict(graph), micro_batch_size) or (0, None)
    wanted = {
        **model,
        "script": (seen.rest_bytes or 0) - known,
        "gradients": seen.trained_bytes,
        "activations": int(activations),
    }
    left, taken = max(0, peak.bytes), {}
    for kind, count in wanted.items():
        taken[kind] = min(max(0, count), left)
        left -= taken[kind]
    if each is not None and taken["activations"] < activations:
        # Less than the graph says, in all: so is each sample's part.
        each = min(each, taken["activations"] / max(1, micro_batch_size))
    has_limit = limit_bytes is not None and budget_bytes is not None
    high_bytes = peak.high_bytes
    if budget_bytes is not None and peak.bytes <= budget_bytes:
        # What goes beyond it is what TensorFlow may count, not what is needed.
        high_bytes = min(high_bytes, budget_bytes)
    return Breakdown(
        micro_batch_size=micro_batch_size,
        parts=Parts(**taken, surplus=left),
        bytes_per_sample=None if each is None else max(0, int(each)),
        peak_bytes=max(0, peak.bytes),
        margin_bytes=high_bytes - max(0, peak.bytes),
        unused_bytes=(budget_bytes or 0) - high_bytes if has_limit else None,
        headroom_bytes=(limit_bytes or 0) - (budget_bytes or 0) if has_limit else None,
    )


def known_from_graph(seen: StateMeasured) -> MemoryModel:
    """What the graph alone says of the training's memory, wherever it is run."""
    return MemoryModel(
        state_bytes=2 * seen.trained_bytes
        + seen.fixed_bytes
        + seen.optimizer_bytes
        + seen.metrics_bytes
        + seen.input_bytes,
        static=dict(zip(seen.graph_sizes, seen.graph_peaks, strict=False)),
    )


def to_json(breakdown: Breakdown) -> dict[str, Any]:
    """As ``oomrun plan --json`` prints it."""
    return asdict(breakdown)


def _line(points: Mapping[int, int], size: int) -> tuple[float, float] | None:
    """The value at ``size`` on the line through the two points around it, its slope.

    Through the last two where it is beyond them, or through nothing at no samples and
    the one point there is.
    """
    known = sorted((at, value) for at, value in points.items() if at > 0)
    if not known:
        return None
    if len(known) == 1:
        known = [(0, 0), *known]
    pair = next((pair for pair in pairwise(known) if size <= pair[1][0]), known[-2:])
    (low_at, low), (high_at, high) = pair
    slope = (high - low) / (high_at - low_at)
    return high + slope * (size - high_at), slope
