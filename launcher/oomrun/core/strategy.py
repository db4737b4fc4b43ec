"""What a strategy is: how one job's script is laid over the devices of a plan.

Strategies are found by name in the entry-point group ``oomrun.strategies``, so that
other packages can add theirs; the ones that come along are in ``oomrun_strategies``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

__all__ = ["ENTRY_POINTS", "Strategy"]

#: The entry-point group; an entry's name is the word in the job file.
ENTRY_POINTS = "oomrun.strategies"


class Strategy(Protocol):
    """Made in the worker, without arguments, before the script runs."""

    def scope(self) -> AbstractContextManager[object]:
        """What the script runs inside of."""
