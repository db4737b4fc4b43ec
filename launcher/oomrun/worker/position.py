"""The position in the data, and going back to it.

An epoch iterator of Keras that can start in the middle of an epoch: it makes the
iterators of the epochs before (each may draw a new shuffle order) and steps over the
batches that were trained. The position is a count of batches of the global batch size,
which recovery never changes, and so a count of samples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers import data_adapters

from oomrun.worker import pool, read_ahead
from oomrun.worker.randomness import EpochSeed

__all__ = ["DataEndedError", "EpochIterator", "Position", "fingerprint", "goes_on"]

_HASHED_BYTES = 1 << 20


class DataEndedError(RuntimeError):
    """The data ended before the position that training had reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where to go on: after ``batches`` batches, in the epoch after ``epochs`` others.

    ``fingerprint`` is that of the last batch trained, empty where it is not known.
    """

    epochs: int
    batches: int
    fingerprint: str = ""


def fingerprint(data: Any) -> str:
    """A checksum of a batch's content, of at most 1 MiB a tensor."""
    digest = hashlib.sha256()
    for value in keras.tree.flatten(data):
        if isinstance(value, tf.Tensor):
            array = np.asarray(value)
            digest.update(str(array.shape).encode())
            if not array.dtype.hasobject:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                digest.update(flat[:_HASHED_BYTES].tobytes())
    return digest.hexdigest()


class EpochIterator(keras_trainer.TFEpochIterator):  # type: ignore[misc]
    """Keras's epoch iterator, with an entrance in mid-epoch."""

    _distributed_dataset: Any

    def __init__(self, *args: Any, epoch_seed: EpochSeed, **kwargs: Any) -> None:
        self._epoch_seed = epoch_seed
        self._epochs_begun = 0
        self._entrance: Position | None = None
        self._done_of_execution = 0
        self._given: Any = None
        #: Called once the data is at the position that was to be entered.
        self.arrived: Callable[[], None] | None = None
        #: Whether the last batch stepped over was the one trained; None: not known.
        self.repeats: bool | None = None
        epoch_seed.building(
            lambda: super(EpochIterator, self).__init__(*args, **kwargs)
        )
        if self._over_arrays:
            self._distributed_dataset = read_ahead.least(self._distributed_dataset)

    @property
    def _over_arrays(self) -> bool:
        adapter, dataset = self.data_adapter, self._distributed_dataset
        arrays = isinstance(adapter, data_adapters.ArrayDataAdapter)
        return arrays and isinstance(dataset, tf.data.Dataset)

    @property
    def waits_for_data(self) -> bool:
        """Whether no batch is read while a step runs, but before it begins."""
        limited = pool.limit_bytes() is not None
        return limited and self._over_arrays and self.steps_per_epoch is None

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch."""
        return self._distributed_dataset.element_spec

    @property
    def batch_size(self) -> int | None:
        """The batch size that the script gave, where the data tells it."""
        return self.data_adapter.batch_size  # type: ignore[no-any-return]

    def rows_of_batch(self, index: int) -> int:
        """Samples of an epoch's batch ``index``, as far as the data tells."""
        adapter = self.data_adapter
        last = self.num_batches is not None and index + 1 == self.num_batches
        return (last and adapter.partial_batch_size) or adapter.batch_size or 1

    def peek(self) -> Any:
        """A first batch, from an iterator of its own."""
        return next(iter(self._distributed_dataset))

    def enter_at(self, position: Position) -> None:
        """The next epoch that is iterated begins at ``position``."""
        self._entrance = position

    def gives(self, iterator: Any) -> bool:
        """Whether Keras was given ``iterator`` for the step that it takes now."""
        return iterator is self._given

    def _enumerate_iterator(self) -> Iterator[Any]:
        entrance, self._entrance = self._entrance, None
        for item in self._one_epoch() if entrance is None else self._enter(entrance):
            self._given = item[-1]
            yield item

    # Keras before 3.7 iterates by this name.
    def enumerate_epoch(self) -> Iterator[Any]:
        """One epoch, as older versions of Keras ask for it."""
        return self._enumerate_iterator()

    def _one_epoch(self) -> Iterator[Any]:
        self._epoch_seed.epoch(self._epochs_begun)
        self._epochs_begun += 1
        base: Any = super()
        if hasattr(base, "_enumerate_iterator"):
            return base._enumerate_iterator()  # type: ignore[no-any-return]
        return base.enumerate_epoch()  # type: ignore[no-any-return]

    def pass_epochs(self, count: int) -> None:
        """Leaves the data as ``count`` epochs of training would have left it."""
        for _ in range(count):
            self._pass_epoch()

    def _pass_epoch(self) -> None:
        """Leaves the pipeline as an epoch of training would have left it."""
        epoch = self._one_epoch()
        if self.steps_per_epoch is not None:
            for *_, iterator in epoch:
                self._step_over(iterator, self.steps_per_execution)
            return
        # A new iterator is made for every epoch; making it draws its shuffle.
        dataset = getattr(self.data_adapter, "_dataset", None)
        if _draws_while_read(dataset) or _reads_ahead(self.data_adapter):
            with self.catch_stop_iteration():
                for *_, iterator in epoch:
                    for _ in range(self.steps_per_execution):
                        next(iterator)
        elif self._num_batches:
            if self._draws_at_first_read:
                next(epoch)
                next(self.data_adapter.get_numpy_iterator())
            for _ in epoch:
                pass  # nothing is read, but Keras makes one more iterator at the end
        else:
            next(epoch, None)
            epoch.close()  # type: ignore[attr-defined]
            self.data_adapter.on_epoch_end()

    @property
    def _draws_at_first_read(self) -> bool:
        """Whether an epoch's order is drawn, from Python's generator, as it is read."""
        adapter = self.data_adapter
        is_own = isinstance(adapter, data_adapters.PyDatasetAdapter)
        return is_own and adapter.shuffle and adapter.num_batches is not None

    def _enter(self, entrance: Position) -> Iterator[Any]:
        self.pass_epochs(entrance.epochs)
        if entrance.batches == 0 and self._draws_at_first_read:
            yield from self._enter_before_the_order()
            return
        passed = 0
        last: Any = None
        for item in self._one_epoch():
            if passed < entrance.batches:
                count = min(self.steps_per_execution, entrance.batches - passed)
                last = self._step_over(item[-1], count)
                passed += count
                if passed == entrance.batches and entrance.fingerprint:
                    self.repeats = fingerprint(last) == entrance.fingerprint
                # Before Keras ends an epoch that is done, which may draw the next one.
                if passed == entrance.batches and self.arrived is not None:
                    self.arrived()
                if count == self.steps_per_execution or passed == self.num_batches:
                    continue
                # Stopped within an execution of several steps: the rest of it is due.
                self._done_of_execution = count
            yield item

    def _enter_before_the_order(self) -> Iterator[Any]:
        """An epoch whose first batch was read, which drew its order, but not trained.

        The generator is put to where it was after that before this one is read.
        """
        drawn_from = random.getstate()
        batches: Iterator[Any] | None = None
        for *steps, iterator in self._one_epoch():
            batches = batches or _in_order_of(drawn_from, iterator)
            yield *steps, batches

    def steps_due(self) -> range:
        """The steps of the execution that is begun, all but after an entrance in it."""
        done, self._done_of_execution = self._done_of_execution, 0
        return range(done, self.steps_per_execution)

    def _step_over(self, iterator: Any, count: int) -> Any:
        data = None
        for _ in range(count):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise DataEndedError(
                    "the data ended before the batch at which training is to go on: "
                    "it has changed since the checkpoint was written"
                ) from None
        return data


def goes_on(iterator: Any) -> bool:
    """Whether it is over a dataset of whose orders each iterator has the next one."""
    dataset = getattr(iterator, "_dataset", None)
    return isinstance(dataset, tf.data.Dataset) and _shuffles(dataset)


def _in_order_of(state: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """All of ``iterator``; what its first item draws is drawn from ``state``.

    A generator that was put elsewhere since is left there.
    """
    now = random.getstate()
    random.setstate(state)
    first = next(iterator, None)
    if now != state:
        random.setstate(now)
    if first is not None:
        yield first
        yield from iterator


def _reads_ahead(adapter: Any) -> bool:
    """Whether threads of Keras's own read a PyDataset.

    What they have read of an epoch that is then not read to its end, they give in the
    next one.
    """
    data = getattr(adapter, "py_dataset", None)
    if data is None or adapter.num_batches is None:
        return False
    return bool(data.workers > 1 or (data.workers > 0 and data.use_multiprocessing))


# Reading one of these makes no iterator of its input but the one made with its own.
_PASSED_THROUGH = frozenset(
    f"_{name}Dataset"
    for name in (
        "Batch", "Filter", "Map", "Options", "PaddedBatch", "ParallelBatch",
        "ParallelMap", "Prefetch", "Skip", "Take", "Zip",
    )
)  # fmt: skip


def _draws_while_read(dataset: Any) -> bool:
    """Whether reading an epoch draws more shuffles than making its iterator does.

    So it is where a shuffle lies under another one, a repeat or a cache: an epoch that
    is passed has to be read then.
    """
    inputs = dataset._inputs() if isinstance(dataset, tf.data.Dataset) else []
    if not any(map(_shuffles, inputs)):
        return False
    if type(dataset).__name__ in _PASSED_THROUGH:
        return any(map(_draws_while_read, inputs))
    return True


def _shuffles(dataset: Any) -> bool:
    return type(dataset).__name__ == "_ShuffleDataset" or any(
        map(_shuffles, dataset._inputs())
    )
