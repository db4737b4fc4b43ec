"""Which checkpoints are kept.

Covers: a rule over plain records. Does not cover: deleting anything.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["superseded"]


def superseded(newest_first: Sequence[str], keep: int) -> list[str]:
    """The checkpoints to delete when the ``keep`` newest are kept (at least one)."""
    return list(newest_first[max(1, keep) :])
