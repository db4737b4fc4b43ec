"""The lever ``host_pipeline``: data are made one batch ahead, and one at a time.

Covers: prefetching and parallel calls of ``tf.data``, queues of Keras's PyDatasets.
What comes out, and in which order, stays the same. Does not cover: shuffle buffers,
since another size draws another order, in which an epoch cannot be gone on with;
``cache``, without which a random ``map`` would be run anew in every epoch.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

__all__ = ["install"]

_PARALLEL = ("map", "interleave", "batch", "padded_batch")


def install() -> None:
    """From now on pipelines are made so. To be called once, before the script runs."""
    _prefetch_one()
    for name in _PARALLEL:
        _one_call_at_a_time(name)
    keras.utils.PyDataset.workers = property(lambda _: 1, _ignored)
    keras.utils.PyDataset.max_queue_size = property(lambda _: 1, _ignored)


def _ignored(_dataset: Any, _value: Any) -> None:
    """The lever decides."""


def _prefetch_one() -> None:
    original = tf.data.Dataset.prefetch

    @functools.wraps(original)
    def prefetch(self: Any, buffer_size: Any, name: Any = None) -> Any:
        return original(self, 1, name=name)

    tf.data.Dataset.prefetch = prefetch


def _one_call_at_a_time(name: str) -> None:
    original = getattr(tf.data.Dataset, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("num_parallel_calls") is not None:
            bound.arguments["num_parallel_calls"] = 1
        return original(*bound.args, **bound.kwargs)

    setattr(tf.data.Dataset, name, method)
