"""How one global batch is cut up, and which smaller cut comes next.

Covers: the arithmetic of global batch, share, micro-batch and accumulation steps.
Does not cover: what fits in memory (``memory.py``) and when to change (``policy.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "accumulation_steps", "even_micro_batch", "known_to_run", "smaller_micro_batch",
]  # fmt: skip

_CLEARLY_LESS, _A_LITTLE_LESS = 0.9, 0.8


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


def known_to_run(
    failed: int,
    measured: Mapping[int, int],
    recorded: Mapping[int, int],
    limit_bytes: int | None,
) -> int:
    """The largest size that should run, of those smaller than one that failed; or 0.

    What was tried counts if it is clearly smaller: what failed may have been tried as
    well. Where the allocations of that one have room, by what was recorded, little was
    missing: a size a little smaller is as good as one that ran.

    Args:
        failed: the micro-batch that ran out of memory.
        measured: peak bytes by size.
        recorded: the least pool that has room, by size.
        limit_bytes: of the device; None: it has none.
    """
    most = failed * _CLEARLY_LESS
    tried = (
        size
        for size, peak in measured.items()
        if size <= most and (limit_bytes is None or peak <= limit_bytes)
    )
    return max(int(failed * _A_LITTLE_LESS) if failed in recorded else 0, *tried, 0)
