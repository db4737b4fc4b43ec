"""What a strategy is: how one job's script is laid over the devices of a plan.

Strategies are found by name in the entry-point group ``oomrun.strategies``, so that
other packages can add theirs; the ones that come along are in ``oomrun_strategies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["ENTRY_POINTS", "Group", "Strategy"]

#: The entry-point group; an entry's name is the word in the job file.
ENTRY_POINTS = "oomrun.strategies"


class Group(Protocol):
    """All the workers of an attempt, each with one replica, as one of them sees them.

    Every method waits for all of them, and all have to call the same ones in the same
    order. ``name`` says which call belongs to which.
    """

    rank: int
    size: int

    def sums(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Each tensor added up over all workers; also inside a graph."""

    def joined(self, tensor: Any, name: str) -> Any:
        """The rows of all workers' tensors, in the order of ranks; also in a graph."""

    def take_from_first(self, variables: Sequence[Any], name: str) -> None:
        """Gives variables the values that they have in the worker of rank 0."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that another worker has gone, not that we failed."""


class Strategy(Protocol):
    """Made in the worker, without arguments, before the script runs."""

    def scope(self) -> AbstractContextManager[object]:
        """What the script runs inside of."""

    def group(self) -> Group | None:
        """The workers of the attempt; None where there is one worker only.

        Called once, when TensorFlow's devices are set up.
        """
