"""One worker a device, each running the script; Horovod adds their gradients up.

Covers: joining the other workers, and what they do together. Who they are is in the
environment that the supervisor made (``oomrun.ranks``).
Does not cover: what of a batch is whose (``oomrun.worker``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["HorovodStrategy"]

# What Horovod 0.28 says when a connection to another worker, or its background thread,
# is gone.
_LOST = (
    "horovod has been shut down",
    "horovodinternalerror",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "[gloo/",
    "ncclcomm",
)


_NOT_THERE = (
    "oomrun: Horovod cannot be imported with this TensorFlow: build it with "
    "tools/build_horovod.py of oomrun's repository ({})"
)


class HorovodStrategy:
    """Trains on one device a worker."""

    def scope(self) -> AbstractContextManager[None]:
        """What the script runs inside of: nothing; every worker runs all of it."""
        return contextlib.nullcontext()

    def group(self) -> HorovodGroup:
        """Waits for all workers to be there."""
        return HorovodGroup()


def _horovod() -> Any:
    """Horovod.

    Raises:
        SystemExit: it is not there, or was built for another TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd

        hvd.gloo_built()
    except Exception as error:  # whatever a library built for another one gives
        raise SystemExit(_NOT_THERE.format(error)) from error
    return hvd


class HorovodGroup:
    """The workers of this attempt; see ``oomrun.core.strategy.Group``."""

    def __init__(self) -> None:
        hvd = _horovod()
        if os.environ.get("TF_CPU_ALLOCATOR_USE_BFC"):
            # Horovod would take 128 MiB of the device's memory to join tensors in.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def sums(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Each tensor added up over all workers; also inside a graph."""
        # One operation takes tensors of one type only.
        by_type: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(index)
        found: list[Any] = [None] * len(tensors)
        for dtype, places in by_type.items():
            sums = self._hvd.grouped_allreduce(
                [tensors[index] for index in places],
                op=self._hvd.Sum,
                name=f"{name}.{dtype.name}",
                ignore_name_scope=True,
            )
            for index, total in zip(places, sums, strict=True):
                found[index] = total
        return found

    def joined(self, tensor: Any, name: str) -> Any:
        """The rows of all workers' tensors, in the order of ranks; also in a graph."""
        return self._hvd.allgather(tensor, name=name, ignore_name_scope=True)

    def take_from_first(self, variables: Sequence[Any], name: str) -> None:
        """Gives variables the values that they have in the worker of rank 0."""
        for index, variable in enumerate(variables):
            variable.assign(
                self._hvd.broadcast(
                    variable, 0, name=f"{name}.{index}", ignore_name_scope=True
                )
            )

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that another worker has gone, not that we failed."""
        text = f"{type(error).__name__}: {error}".lower()
        return any(words in text for words in _LOST)

    def leave(self) -> None:
        """What others wait for is in their connections by now."""
