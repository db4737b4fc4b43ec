"""What a device may use, and what a plan is predicted to use.

Covers: limits and budgets; a prediction from what this run has measured, as an
interval. Does not cover: probing and reading graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Peak", "budget_bytes", "limit_grew", "predict_peak"]

# The peak of one step differs from the next by this much with the order in which the
# executor happens to run operations (measured: 10-20 %), so that an interval made
# from peaks of one size is widened by it; more where another size is extrapolated to.
_SPREAD = 0.10
_EXTRAPOLATION_SPREAD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A predicted peak, in bytes: the most likely value and the upper end."""

    bytes: int
    high_bytes: int


def budget_bytes(limit_bytes: int, headroom: float | int) -> int:
    """The bytes we plan into: ``limit_bytes`` less the headroom.

    Args:
        limit_bytes: bytes that the device may use.
        headroom: a fraction of the limit (float, below 1) or bytes (int).
    """
    kept = int(limit_bytes * headroom) if isinstance(headroom, float) else headroom
    return max(0, limit_bytes - kept)


def limit_grew(then_bytes: int | None, now_bytes: int | None) -> bool:
    """Whether a limit is so much higher that what failed before may fit now.

    A tenth, since a GPU's limit is what is free on it, which is never twice the same.
    None is no limit.
    """
    if then_bytes is None:
        return False
    return now_bytes is None or now_bytes > then_bytes * 1.1


def predict_peak(
    micro_batch_size: int, measured: Mapping[int, int], state_bytes: int | None
) -> Peak | None:
    """The peak of a step at ``micro_batch_size``, from peaks measured in this run.

    A size that was measured predicts itself. Another is read off the line through
    the two nearest measured sizes, or through one of them and the model's own state
    (weights, gradients, optimizer slots: the peak at no samples).

    Args:
        micro_batch_size: samples a pass.
        measured: peak bytes by micro-batch size.
        state_bytes: bytes of weights, gradients and optimizer slots, where known.

    Returns:
        None where nothing was measured.
    """
    if not measured:
        return None
    if micro_batch_size in measured:
        peak = measured[micro_batch_size]
        return Peak(bytes=peak, high_bytes=int(peak * (1 + _SPREAD)))
    points = sorted(
        measured.items(), key=lambda point: abs(point[0] - micro_batch_size)
    )[:2]
    if len(points) == 1:
        points.append((0, min(state_bytes or 0, points[0][1])))
    (size_a, peak_a), (size_b, peak_b) = points
    slope = max(0.0, (peak_a - peak_b) / (size_a - size_b))
    peak = int(max(0.0, peak_a + slope * (micro_batch_size - size_a)))
    return Peak(bytes=peak, high_bytes=int(peak * (1 + _EXTRAPOLATION_SPREAD)))
