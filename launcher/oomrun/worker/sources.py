"""The sources of a loop's batches, and going back to a position in them.

Covers: how often each source was iterated and how far, leaving one as that many
iterations would have left it, batch by batch. A source is whatever a script iterates: a
``tf.data`` pipeline, a list, a generator, an iterator that it keeps over epochs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from oomrun.worker import position

__all__ = ["Sources", "step_over"]


class Sources:
    """What was taken from each source in this process: batches an iteration."""

    def __init__(self) -> None:
        self._taken: dict[int, list[int]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def taken(self, source: Any) -> list[int]:
        """Batches taken in each iteration so far; a copy."""
        return list(self._taken.get(id(_root(source)), []))

    def iterate(self, source: Any) -> Iterator[Any]:
        """Another iteration of ``source``, counted."""
        counts = self._counts(_root(source))
        counts.append(0)
        at = len(counts) - 1
        for batch in source:
            counts[at] += 1
            yield batch

    def catch_up(self, source: Any, taken: list[int]) -> None:
        """Leaves ``source`` as iterations that took so many batches have left it."""
        known = self._counts(_root(source))
        due = taken[len(known) :]
        known += due
        own = iter(source) if due else None
        if own is source:
            step_over(own, sum(due))
        elif isinstance(source, tf.data.Dataset):
            # Making an iterator draws its shuffle; reading matters to few pipelines.
            read = position._draws_while_read(source)
            for index, count in enumerate(due):
                iterator = own if index == 0 else iter(source)
                step_over(iterator, count if read else 0)

    def _counts(self, root: Any) -> list[int]:
        key = id(root)
        try:
            self._alive.setdefault(key, weakref.ref(root, lambda _: self._forget(key)))
        except TypeError:
            return []  # a list, say: it is the same each time, or made anew
        return self._taken.setdefault(key, [])

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._taken.pop(key, None)


def _root(source: Any) -> Any:
    """What keeps the position: of a pipeline its first shuffle, else the source.

    So a pipeline that is cut anew in every epoch (``dataset.take(100)``) is known.
    """
    if isinstance(source, tf.data.Dataset):
        waiting = [source]
        while waiting:
            dataset = waiting.pop(0)
            if type(dataset).__name__ == "_ShuffleDataset":
                return dataset
            waiting += dataset._inputs()
    return source


def step_over(iterator: Any, count: int) -> Any:
    """Takes ``count`` batches; the last one.

    Raises:
        DataEndedError: there are fewer.
    """
    batch = None
    for _ in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            raise position.DataEndedError(
                "the data ended before the batch at which training is to go on: it has "
                "changed since the checkpoint was written"
            ) from None
    return batch
