"""How far ``tf.data`` reads ahead into the pool of a CPU device with a limit, and when.

Batches that are read ahead lie in the device's memory. A buffer whose size is left to
TensorFlow (``prefetch(AUTOTUNE)``, as Keras makes it for arrays) is doubled whenever it
was found empty: on a busy machine that happens by chance, in the midst of a training,
long after it was planned what fits. Measured: of batches of 8 MiB, four lay in the pool
at first and nine some steps later. So all buffers of a pipeline have a budget. The
elements and their order are the same.

Batches of arrays are copied in milliseconds. Of large ones as few are read ahead as can
be, and a step waits until they lie there: one that is read while a step runs is given a
place in the midst of what its tensors come and go from, and may leave the next step no
room (``core/reading_ahead.py``).

Source of what is relied on: ``PrefetchAutotuner`` in tensorflow/core/kernels/data,
which asks ``RamBudgetManager`` (core/framework/model.h) before it doubles a buffer;
``get_tf_dataset`` in keras/src/trainers/data_adapters/array_data_adapter.py.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from oomrun.worker import places, pool
from oomrun.worker.fit_call import FitCall

__all__ = ["Ahead", "bound", "least"]

# Of the pool: less than the headroom, which so covers what comes to be read later. With
# less, samples of a hundredth of the pool were no longer made in parallel.
_SHARE = 0.05
# Calls of a ``map`` at once, to begin with: there may be as many elements, finished. As
# it is, it begins with one for each core.
_CALLS = 2
_PARALLELISM = "initial_parallelism"
# Batches of arrays beside the one that was pulled: one that was made, one that waits.
_AHEAD = 2
# To copy one takes milliseconds, and longer only where others have the processor.
_PATIENCE_S, _POLL_S = 1.0, 0.0002
# Epochs in which it was waited for in vain, after which it is not tried again: what a
# callback holds at an epoch's begin, and lets go of then, looks like data to come.
_OFTEN = 2


def bound() -> None:
    """From now on pipelines have a budget. To be called once, before the script runs.

    Does nothing for a process whose CPU device has no limit. What the script's own
    options say stays.
    """
    limit = pool.limit_bytes()
    if limit is None:
        return
    budget = max(1, int(_SHARE * limit))
    original = tf.data.Dataset.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        if tf.executing_eagerly():
            self = self.with_options(_options(self.options().autotune, budget))
        return original(self)  # type: ignore[no-any-return]

    tf.data.Dataset.__iter__ = __iter__


def _options(given: Any, budget: int) -> tf.data.Options:
    """What ``given``, the script's own, leave open."""
    options = tf.data.Options()
    if given.ram_budget is None:
        options.autotune.ram_budget = budget
    # TensorFlow 2.16 has it not: False.
    if getattr(given, _PARALLELISM, False) is None:
        calls = min(_CALLS, os.cpu_count() or 1)
        setattr(options.autotune, _PARALLELISM, calls)
    return options


def least(dataset: Any) -> Any:
    """``dataset``, read ahead as little as can be where its device has a limit."""
    if pool.limit_bytes() is None:
        return dataset
    options = tf.data.Options()
    options.autotune.ram_budget = places.LARGE
    if hasattr(options.autotune, _PARALLELISM):
        setattr(options.autotune, _PARALLELISM, 1)
    return dataset.with_options(options)


class Ahead:
    """Has the steps of a fit over arrays wait for what is read ahead of them."""

    def __init__(self) -> None:
        # Bytes in use while nothing is read; None where that is not known.
        self._rest: int | None = None
        self._late = 0

    def before_batch(self, call: FitCall) -> None:
        """To be called before a batch is pulled, when the one before is let go."""
        if call.places is None:
            call.places = _places(call.iterator)
        if call.batches == 0:
            self._rest = _in_use_bytes() if self._late < _OFTEN else None
        elif call.entered == call.batches:
            self._rest = None  # some of it has been read already

    def wait(self, call: FitCall, batch_bytes: int) -> None:
        """Returns when the next batches have been read, or something seems wrong.

        Args:
            call: the fit.
            batch_bytes: of the batch that was pulled.
        """
        if self._rest is None or batch_bytes < places.LARGE:
            return
        rows = call.iterator.rows_of_batch
        last = min(call.batches + _AHEAD, call.iterator.num_batches - 1)
        share = sum(map(rows, range(call.batches, last + 1))) / rows(call.batches)
        # The allocator may hand a little more out for each.
        enough = self._rest + int((share - 0.5) * batch_bytes)
        ends = time.monotonic() + _PATIENCE_S
        while _in_use_bytes() < enough:
            if time.monotonic() > ends:
                self._rest = None  # not again in this epoch
                self._late += 1
                return
            time.sleep(_POLL_S)


def _places(iterator: Any) -> list[Any]:
    """What keeps places for the batches of a fit apart."""
    batches = min(1 + _AHEAD, iterator.num_batches)
    rows = iterator.rows_of_batch(0)
    free_bytes = (pool.limit_bytes() or 0) - _in_use_bytes()
    return places.keep_apart(iterator.element_spec, rows, batches, free_bytes)


def _in_use_bytes() -> int:
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])
