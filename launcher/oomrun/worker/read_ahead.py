"""How far ``tf.data`` reads ahead into the pool of a CPU device with a limit.

Batches that are read ahead lie in the device's memory. A buffer whose size is left to
TensorFlow (``prefetch(AUTOTUNE)``, as Keras makes it for arrays) is doubled whenever it
was found empty: on a busy machine that happens by chance, in the midst of a training,
long after it was planned what fits. Measured: of batches of 8 MiB, four lay in the pool
at first and nine some steps later. With a budget for all buffers it stays at four; the
elements and their order are the same.

Source of what is relied on: ``PrefetchAutotuner`` in tensorflow/core/kernels/data,
which asks ``RamBudgetManager`` (core/framework/model.h) before it doubles a buffer.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from oomrun.worker import pool

__all__ = ["bound"]

# Of the pool: less than the headroom, which so covers what comes to be read later. With
# less, samples of a hundredth of the pool were no longer made in parallel.
_SHARE = 0.05
# Calls of a ``map`` at once, to begin with: there may be as many elements, finished. As
# it is, it begins with one for each core.
_CALLS = 2


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
    if given.initial_parallelism is None:
        options.autotune.initial_parallelism = min(_CALLS, os.cpu_count() or 1)
    return options
