"""How far apart the arrays of two computations of one step may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["alike", "tolerance"]


def alike(
    ones: Sequence[np.ndarray[Any, Any]],
    others: Sequence[np.ndarray[Any, Any]],
    tolerance: float,
) -> bool:
    """Whether two lists of arrays differ by rounding only."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return False
    pairs = [
        (np.asarray(one, np.float64), np.asarray(other, np.float64))
        for one, other in zip(ones, others, strict=True)
    ]
    norms = [float(np.linalg.norm(one)) for one, _ in pairs]
    # Rounding in one array may be that of sums over all: a small one is no reason.
    floor = max(1e-3 * max(norms, default=0.0), 1e-12)
    return all(
        float(np.linalg.norm(one - other)) <= tolerance * max(norm, floor)
        for norm, (one, other) in zip(norms, pairs, strict=True)
    )


def tolerance(model: Any) -> float:
    """How far apart two computations of one step may be, relative to the norm."""
    dtypes = {getattr(layer, "compute_dtype", "") for layer in model._flatten_layers()}
    if dtypes & {"float16", "bfloat16"}:
        return 5e-2
    return 1e-4 if "float32" in dtypes else 1e-8
