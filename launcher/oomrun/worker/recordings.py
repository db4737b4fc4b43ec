"""What the recorded allocations of trials say of the sizes that were not tried.

Covers: which trials are recorded, and at which sizes, so that one of them tells what
all others ask for. Does not cover: recording (``engine/recording.py``), what follows
(``core/allocations.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oomrun.core import allocations
from oomrun.core.allocations import Recording
from oomrun.core.allocator import GRAIN
from oomrun.core.convolutions import Buffer
from oomrun.core.plan import Plan
from oomrun.core.reading_ahead import is_crowded
from oomrun.core.recorded import (
    AS_IT_HAPPENS,
    IN_ORDER,
    Recorded,
    rises_with_size,
)
from oomrun.worker import devices, pool
from oomrun.worker.engine import recording

__all__ = ["Recordings"]

#: How far below what is wanted a size may be so that its recording is a telling one:
#: the first, and those that come nearer to what is trained with.
_BELOW, _BELOW_AGAIN = 0.6, 0.98


class Recordings:
    """Of the trials of one model's step.

    Args:
        plan: of this worker.
        variables: of the model and its optimizer.
        beside_bytes: what the steps to come hold beside what is recorded.
        records: whether they are recorded at all. XLA plans a step's memory itself, by
            rules of its own; and another trace of a step than the one that trains may
            have another order.

    Attributes:
        best: the telling one of the largest size; None while there is none.
        crowded: the smallest size that ran, but would not wherever the next batches may
            come to lie.
        spread: see ``Recorded``.
        batch_bytes: see ``Recorded``.
        buffers: that operations take on a CPU, from some size on.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Iterable[Any],
        *,
        beside_bytes: int = 0,
        records: bool,
    ) -> None:
        self._plan = plan
        limit_bytes = plan.devices[0].limit_bytes
        self._pool_bytes = limit_bytes and max(GRAIN, limit_bytes - beside_bytes)
        self._allocator = _allocator(plan) if records else None
        self._lengths = tuple(math.prod(variable.shape) for variable in variables)
        self._pools: dict[int, int] = {}
        self._needed: dict[int, int] = {}
        self.best: Recording | None = None
        self.crowded: int | None = None
        self._in_parts = True  # the best
        self.spread = AS_IT_HAPPENS
        self.batch_bytes = 0
        self.buffers: Sequence[Buffer] = ()

    @property
    def exact(self) -> bool:
        """Whether one step's recording is like the next one's."""
        return self._allocator is not None and self.spread == IN_ORDER

    def known(
        self, rows: int, earlier: Mapping[int, int], measured: Mapping[int, int]
    ) -> Recorded:
        """What they tell.

        Args:
            rows: of the batch.
            earlier: pools by size, of the recordings of an earlier run.
            measured: peaks by size.
        """
        # A peak may have what nobody needed in it.
        needed = {**measured, **(self._needed or earlier)}
        if not (rises_with_size(measured) or rises_with_size(needed)):
            return Recorded(buffers=self.buffers)
        return Recorded(
            pools=dict(self._pools or earlier),
            best=self.best,
            spread=self.spread,
            pool_bytes=self._pool_bytes,
            batch_bytes=self.batch_bytes,
            rows=rows,
            in_parts=self._in_parts,
            reads_into_pool=self._reads_into_pool,
            buffers=self.buffers,
        )

    def size_to_try(self, wanted: int, samples: int) -> int:
        """``wanted``, or a slightly smaller size whose recording is a telling one."""
        if self._allocator is None or wanted >= samples:
            return wanted
        below = _BELOW if self.best is None else _BELOW_AGAIN
        return allocations.telling_size(wanted, samples, self._fixed, below) or wanted

    @property
    def _fixed(self) -> tuple[int, ...]:
        """Lengths of what does not grow with a pass. Those of buffers are in bytes."""
        return (*self._lengths, *(buffer.bytes for buffer in self.buffers))

    def end(self) -> None:
        """Samples are of different sizes: nothing that was recorded counts any more.

        Then data lie wherever there was room for their size, and with them what is free
        is split in ways that no other step shows. (Passes whose pool was 60 MiB ran out
        of 80.)
        """
        self._allocator, self.best, self.crowded = None, None, None
        self._pools, self._needed = {}, {}

    def take(
        self, step: Callable[[], Any], rows: int, size: int, more: int
    ) -> int | None:
        """Takes a step, recorded where that can be.

        Args:
            step: takes it.
            rows: of its batch.
            size: samples of a pass.
            more: bytes that the steps to come hold beside what this one does.

        Returns:
            The least pool that has room for it, more than the device's where that would
            run out in a later step; None where it is not known.
        """
        if self._allocator is None:
            step()
            return None
        memory, *_ = devices.read_memory(self._plan)
        telling = allocations.telling_size(size, rows, self._fixed, 1.0) == size
        found = recording.record(
            step,
            size,
            allocator=self._allocator,
            in_use_bytes=memory.in_use_bytes or 0,
            pool_bytes=memory.limit_bytes,
            telling=telling,
        )
        if found is None:
            return None
        found = allocations.with_more(found, more)
        if telling and (self.best is None or self.best.size <= size):
            self.best, self._in_parts = found, size < rows
        self._needed[size] = allocations.needed_bytes(found)
        self._pools[size] = least = allocations.least_pool(found)
        if (
            self._reads_into_pool
            and self._pool_bytes is not None
            and is_crowded(found, self._pool_bytes, self.batch_bytes)
        ):
            self.crowded = min(size, self.crowded or size)
            least = max(least, self._pool_bytes + GRAIN)
        return least

    @property
    def _reads_into_pool(self) -> bool:
        # On a GPU data lie in the host's memory until a step wants them.
        return self._allocator == recording.CPU_ALLOCATOR


def _allocator(plan: Plan) -> str | None:
    """The allocator of the device; None where its memory is not one piece.

    A pool that grows takes its memory in regions, which lie apart.
    """
    if plan.devices[0].kind == "cpu":
        return recording.CPU_ALLOCATOR if pool.limit_bytes() is not None else None
    return recording.GPU_ALLOCATOR if plan.memory_mode != "growth" else None
