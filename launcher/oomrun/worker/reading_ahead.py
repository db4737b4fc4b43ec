"""The next batch is read before the step on this one begins, and not in its midst.

On a CPU device with a limit the data lie in the pool that a step is served from. What
reads them ahead does so while a step runs: the next batch is then given a piece in the
midst of what the step's tensors come and go from, and there it lies when the next step
begins. Measured: sizes that had run for 2 to 16 steps ran out of memory so, 7 of 10 of
which took all of their 20 steps once there was a pause before each. At rest the next
batch is given the piece of the one before.

Covers: pulling a batch, and the pause. Does not cover: where a batch would come to lie
otherwise (``oomrun.core.reading_ahead``).
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from oomrun.worker import pool
from oomrun.worker.engine import slicing

__all__ = ["ReadAhead"]

#: A batch is there a few milliseconds after the one before was pulled, or not soon.
_PATIENCE_S, _LOOK_S = 0.02, 0.0005
#: Where nothing was read in that time so often in a row, these data are not read
#: ahead, or the machine is busy: one pull in so many still waits for it.
_MISSES, _SELDOM = 4, 16
#: A batch of a smaller part of the pool leaves no hole that decides.
_SMALL = 1 / 256
#: Of a batch's bytes: what a step before returned may be let go at the same time.
_MOST = 0.9


class ReadAhead:
    """Of the batches of one model.

    Attributes:
        at_rest: whether the batch after the last one was read before that was given;
            False where it is small.
    """

    def __init__(self) -> None:
        self._limit_bytes = pool.limit_bytes()
        self._first = True
        self._pulls = self._misses = 0
        self.at_rest = False

    def pull(self, iterator: Any, *, waits: bool = True) -> Any:
        """The next batch, as tensors; the one after it is read by then, if it can be.

        Args:
            iterator: over the batches.
            waits: whether to pause at all.

        Raises:
            StopIteration: or ``tf.errors.OutOfRangeError``, as ``iterator`` does.
        """
        waits = waits and self._limit_bytes is not None
        if self._misses >= _MISSES:
            waits = waits and self._pulls % _SELDOM == 0
        first, self._first = self._first, True  # where the data have ended
        self.at_rest = False
        before, began = _in_use_bytes() if waits else 0, time.perf_counter()
        data = slicing.as_tensors(next(iterator))
        self._first = False
        self._pulls += 1
        late = not first and time.perf_counter() - began > _PATIENCE_S
        batch_bytes = slicing.bytes_of(data)
        if waits and batch_bytes >= (self._limit_bytes or 0) * _SMALL:
            # All but the first of an epoch had been read before, unless it was late.
            more = (first + _MOST) * batch_bytes
            self.at_rest = not late and _reaches(before + more)
            self._misses = 0 if self.at_rest else self._misses + 1
        return data


def _reaches(in_use_bytes: float) -> bool:
    """Waits a little until so much is in use; whether it was."""
    until = time.perf_counter() + _PATIENCE_S
    while _in_use_bytes() < in_use_bytes:
        if time.perf_counter() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def _in_use_bytes() -> int:
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])
