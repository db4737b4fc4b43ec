"""What a device's pool must have for steps of any size, by recorded allocations.

Covers: ``Recorded``, what the trials of a model have told; predictions from it, and
whether a size fits. Does not cover: predictions where nothing could be recorded
(``memory.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from oomrun.core import allocations, convolutions
from oomrun.core.allocations import Recording
from oomrun.core.convolutions import Buffer
from oomrun.core.reading_ahead import LESS_CROWDED, is_crowded

__all__ = ["AS_IT_HAPPENS", "IN_ORDER", "Recorded", "rises_with_size"]

#: How far the upper end lies above the most likely value, as a fraction of it, where
#: operations run in one order, and where they run as the executor happens to.
IN_ORDER, AS_IT_HAPPENS = 0.02, 0.08
#: How much further where the step was recorded in another form than it will be taken
#: in: whole and not in parts, say. A whole step that should have needed 136 of 152 MB,
#: by one in parts, ran out; parts of a recurrent network needed 1.18 times what a
#: small batch had told. In order, parts are as small batches are.
_OTHER_FORM = {IN_ORDER: 0.06, AS_IT_HAPPENS: 0.12}
#: And for each byte between a size that ran and another one: the workspace of
#: convolutions, say, grows in steps.
_RISE = 0.1
#: So much of the pool may be taken where a batch of the data more lies in it than lay
#: there when it was recorded: the next ones are read while a step runs.
_OF_POOL = 0.99
#: So much of it may be taken by a step's pieces, with the holes between them, where
#: what it has in use is within the budget.
_RAN_IN = 0.95
#: The same where each step finds the pool as the trial did.
_RAN_ALIKE = 0.98
#: So often a smaller size is looked for that is not crowded.
_TIMES = 6
#: A smaller size that took so much more than a larger one did not take it by chance.
_MORE = 1.02


def rises_with_size(needed: Mapping[int, int]) -> bool:
    """Whether larger sizes needed more.

    Not where sums of sparse gradients grow with the number of passes, and with the rows
    that a batch happens to name: no recording of one size tells of them.

    Args:
        needed: bytes by size, or the peaks that TensorFlow told.
    """
    ran = [count for _, count in sorted(needed.items())]
    return all(less <= more * _MORE for less, more in pairwise(ran))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Of one model.

    Attributes:
        pools: bytes of the least pool that has room for a step, by micro-batch size, of
            those whose allocations were recorded.
        best: a telling one of them, which says what other sizes ask for; None where
            none is at hand, as where an earlier run has recorded.
        spread: how far upper ends lie above it, as a fraction of it.
        pool_bytes: of the device's pool, where it is known.
        batch_bytes: of a batch of the data that is read into it while a step runs; 0:
            all that are there were read before.
        rows: of a batch; a step of fewer samples a pass is taken in parts.
        in_parts: whether ``best`` was.
        reads_into_pool: whether batches of the data lie in it.
        buffers: that operations take from some size on, beside what graphs show.
    """

    pools: Mapping[int, int] = field(default_factory=dict)
    best: Recording | None = None
    spread: float = AS_IT_HAPPENS
    pool_bytes: int | None = None
    batch_bytes: int = 0
    rows: int = 0
    in_parts: bool = True
    reads_into_pool: bool = False
    buffers: Sequence[Buffer] = ()

    def predict(self, size: int) -> tuple[int, int] | None:
        """The least pool for a step, most likely value and upper end; None: not known.

        Args:
            size: samples of a pass.
        """
        if size in self.pools:
            likely = self.pools[size]
            return likely, int(likely * (1 + self.spread))
        if self.best is None or not self.pools:
            return None
        near = self._near(size)
        rise = self._pool_at(size) - self._pool_at(near)
        likely = max(1, self.pools[near] + rise)
        unsure = abs(rise - self._more_buffer(size, near))
        spread = likely * self._spread(size) + unsure * _RISE
        return likely, int(likely + spread)

    def fits(self, size: int, budget_bytes: int, *, tried: bool = True) -> bool | None:
        """Whether a step surely fits; None where it is not known.

        What it has in use is within the budget, its pieces leave a little of the pool,
        and there is room in it for one more batch of the data.

        Args:
            size: samples of a pass.
            budget_bytes: what we plan into.
            tried: whether it is tried before it is trained with; otherwise its pieces,
                with the holes between them, have to be within the budget too.
        """
        if self.best is None or not self.pools:
            known = self.predict(size)
            return None if known is None else known[1] <= budget_bytes
        then = self._at_size(size)
        if self.pool_bytes is None:
            return self._pool_within(then, budget_bytes)
        in_use = allocations.needed_bytes(then) * (1 + self._spread(size))
        most = budget_bytes
        # What one tells of the others has been seen to hold.
        if tried and len(self.pools) > 1:
            most = max(most, int(self.pool_bytes * self._ran_in))
        if in_use > budget_bytes or not self._pool_within(then, most):
            return False
        then = allocations.with_more(then, self.batch_bytes)
        return allocations.fits(then, int(self.pool_bytes * _OF_POOL))

    def less_crowded(self, size: int) -> int:
        """The next smaller size that leaves room wherever the next batches may lie.

        Args:
            size: samples of a pass, of a step that fits.
        """
        pool_bytes = self.pool_bytes
        if self.best is None or pool_bytes is None or not self.reads_into_pool:
            return size
        for _ in range(_TIMES):
            if size in self.pools or size < 1:
                break
            if not is_crowded(self._at_size(size), pool_bytes, self.batch_bytes):
                break
            size = int(size * LESS_CROWDED)
        return size

    def handed_out(self, size: int) -> int | None:
        """The peak that TensorFlow will likely tell of a step; None: not known."""
        if self.best is None or self.pool_bytes is None:
            return None
        then = self._at_size(size)
        return allocations.pool_peak(then, self.pool_bytes) or self.pool_bytes

    def ran_within(self, size: int, peak: int | None, budget_bytes: int) -> bool:
        """Whether a size that ran has stayed within a budget, and will again.

        What it had in use counts, and that its pieces leave a little of the pool. (A
        smaller size need not need less: sums of sparse gradients grow with the passes.)

        Args:
            size: samples of a pass.
            peak: that TensorFlow told of it, bytes; None: it did not run.
            budget_bytes: what we plan into.
        """
        least = self.pools.get(size)
        if peak is None or least is None or self.pool_bytes is None:
            return False
        return peak <= budget_bytes and least <= self.pool_bytes * self._ran_in

    @property
    def _ran_in(self) -> float:
        alike = self.reads_into_pool and not self.batch_bytes
        return _RAN_ALIKE if alike else _RAN_IN

    def _at_size(self, size: int) -> Recording:
        """What a step of another size asks for."""
        assert self.best is not None
        found = allocations.at_size(self.best, size)
        return allocations.with_more(found, self._more_buffer(size, self.best.size))

    def _more_buffer(self, size: int, than: int) -> int:
        """By how much the buffers of a size are larger than those of another one."""
        ordered = self.spread == IN_ORDER
        return convolutions.more_bytes(self.buffers, size, than, in_order=ordered)

    def _pool_at(self, size: int) -> int:
        return allocations.least_pool(self._at_size(size))

    def _spread(self, size: int) -> float:
        """How far the upper end lies above, of a size that was not recorded."""
        whole = self.rows > 0 and size >= self.rows
        if whole != self.in_parts or (self.spread == IN_ORDER and not whole):
            return self.spread
        return self.spread + _OTHER_FORM.get(self.spread, 0.0)

    def _near(self, size: int) -> int:
        return min(self.pools, key=lambda ran: (abs(ran - size), ran))

    def _pool_within(self, then: Recording, most: int) -> bool:
        """Whether the upper end of ``predict`` is; in a tenth of the time."""
        size, near = then.size, self._near(then.size)
        same = self.spread if size == near else self._spread(size)
        left = most - self.pools[near] * (1 + same)
        if size == near:
            return left >= 0
        buffer = self._more_buffer(size, near)
        left -= buffer * (1 + same)
        rise = buffer + left / (1 + same + (_RISE if left > 0 else -_RISE))
        pool_bytes = int(self._pool_at(near) + rise)
        return allocations.fits(then, pool_bytes)
