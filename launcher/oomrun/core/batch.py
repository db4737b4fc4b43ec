"""How one global batch is cut up, and which smaller cut comes next.

Covers: the arithmetic of global batch, share, micro-batch and accumulation steps.
Does not cover: what fits in memory (``memory.py``) and when to change (``policy.py``).
"""

from __future__ import annotations

__all__ = ["accumulation_steps", "even_micro_batch", "smaller_micro_batch"]


def accumulation_steps(share: int, micro_batch_size: int) -> int:
    """Micro-batches that cover ``share`` samples, the last one possibly smaller."""
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be >= 1, got {micro_batch_size}")
    return -(-share // micro_batch_size)


def even_micro_batch(share: int, micro_batch_size: int) -> int:
    """A micro-batch, at most as large, that cuts ``share`` into passes of one size.

    Where that would need more than half as many passes again, all but the last are.
    """
    passes = accumulation_steps(share, micro_batch_size)
    for more in range(passes, passes * 3 // 2 + 1):
        if share % more == 0:
            return share // more
    return -(-share // passes)


def smaller_micro_batch(share: int, failed: int, largest_that_ran: int = 0) -> int:
    """The next micro-batch to try after ``failed`` samples did not fit.

    Halves, so that few distinct sizes are ever seen (each may cost a compilation),
    but never goes below a size that is known to run.

    Args:
        share: samples per step of this replica.
        failed: the micro-batch that ran out of memory.
        largest_that_ran: the largest size known to run, 0 where none is.

    Returns:
        A size in ``[1, failed)``, or 0 when ``failed`` was already 1.
    """
    failed = min(failed, share)
    if failed <= 1:
        return 0
    half = failed // 2
    if 0 < largest_that_ran < failed:
        # A size above the half that is known to run beats an untried half.
        return max(half, largest_that_ran)
    return half
