"""Sums, rows and values of all workers, by TensorFlow's collective operations.

Covers: what a ``Group`` does together, once the runtime for it is started.
Does not cover: starting it (``multi_worker_mirrored``).

An operation belongs to those of the other workers by its key. It is made of what is
added up, so it is the same in each step and in each worker, whenever that one has
traced its graph, or taken a step again. TensorFlow keeps what it knows of a key for
good: with a new one for each operation, as its own strategy has them, 0.8 KiB a time
(measured).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Collectives"]

# Smaller tensors travel together: each operation costs some messages.
_SMALL_BYTES = 2**18
_PACK_BYTES = 2**22
# Keys are multiples of it: of one that depends on a size, there are as many.
_SIZES = 32
_ACCELERATORS, _HOSTS = 7101, 7102  # groups of devices; the script may have others

# What the connection to another worker, or NCCL's, says when that one is gone.
_LOST = (
    "additional grpc error information",
    "failed to connect",
    "connection reset",
    "connection refused",
    "socket closed",
    "stream removed",
    "unavailableerror",
    "ncclcomm",
)


class Collectives:
    """The workers of an attempt; see ``oomrun.core.strategy.Group``.

    Args:
        rank: which of them this is.
        size: how many there are.
        device: what this one trains on, by its name among all of them.
    """

    def __init__(self, rank: int, size: int, device: str) -> None:
        import tensorflow as tf

        self.rank, self.size = rank, size
        self._tf = tf
        self._device = device
        self._host = device.rpartition("/")[0] + "/device:CPU:0"
        self._keys: dict[int, tuple[Any, ...]] = {}
        # TensorFlow keeps operations with the same token in the order of the program,
        # as NCCL asks for.
        with tf.device(device):
            self._order = tf.Variable(0.0, trainable=False, name="oomrun_order")

    def sums(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Each tensor added up over all workers; also inside a graph.

        Their static shapes have to be the same in all workers, as variables' are.
        """
        return self._in_packs(tensors, name, self._sum)

    def joined(self, tensor: Any, name: str) -> Any:
        """The rows of all workers' tensors, in the order of ranks; also in a graph."""
        tf = self._tf
        given = tf.convert_to_tensor(tensor)
        told = tf.stack([tf.constant(self.rank), tf.shape(given)[0]])[tf.newaxis]
        # In the order that TensorFlow has the workers in.
        ranks, counts = tf.unstack(self._gather(told, f"{name}.counts"), axis=1)
        # All have to give equally many rows; by powers of two they are few sizes.
        powers = tf.constant([2**power for power in range(_SIZES - 1)])
        size = tf.reduce_sum(tf.cast(tf.reduce_max(counts) > powers, tf.int32))
        padded = tf.gather(powers, size)
        missing = [[0, padded - tf.shape(given)[0]], *[[0, 0]] * (given.shape.rank - 1)]
        rows = self._gather(tf.pad(given, missing), name, size)
        order = tf.argsort(ranks)
        counts = tf.gather(counts, order)
        before = tf.cumsum(counts, exclusive=True)
        shift = tf.repeat(order * padded - before, counts)
        found = tf.gather(rows, shift + tf.range(tf.reduce_sum(counts)))
        found.set_shape([None, *given.shape[1:]])
        return found

    def take_from_first(self, variables: Sequence[Any], name: str) -> None:
        """Gives variables the values that they have in the worker of rank 0."""
        values = self._in_packs(variables, name, self._first)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that another worker has gone, not that we failed.

        An error that another worker had, TensorFlow hands on: it is that one's.
        """
        text = f"{type(error).__name__}: {error}".lower()
        return any(words in text for words in _LOST)

    def leave(self) -> None:
        """Nothing is to be done."""

    # -- operations ----------------------------------------------------------------

    def _in_packs(
        self, tensors: Sequence[Any], name: str, together: Callable[[Any, str], Any]
    ) -> list[Any]:
        """What ``together`` makes of tensors, several small ones in one."""
        tf = self._tf
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        found: list[Any] = list(given)
        for number, places in enumerate(_packs(given)):
            own = f"{name}.{number}"
            if len(places) == 1:
                (place,) = places
                found[place] = together(given[place], own)
                continue
            flat = tf.concat([tf.reshape(given[place], [-1]) for place in places], 0)
            sizes = [given[place].shape.num_elements() for place in places]
            parts = tf.split(together(flat, own), sizes)
            for place, part in zip(places, parts, strict=True):
                found[place] = tf.reshape(part, given[place].shape)
        return found

    def _sum(self, tensor: Any, name: str) -> Any:
        tf = self._tf
        carried = tf.cast(tensor, self._carried_as(tensor.dtype))
        told = self._told("sum", name, carried, carried.shape)
        with tf.device(self._where(carried)):
            total = tf.raw_ops.CollectiveReduceV2(
                input=carried,
                merge_op="Add",
                final_op="Id",
                ordering_token=[self._order.handle],
                **told,
            )
        total.set_shape(tensor.shape)
        return tf.cast(total, tensor.dtype)

    def _gather(self, tensor: Any, name: str, size: Any = 0) -> Any:
        tf = self._tf
        carried = tf.cast(tensor, self._carried_as(tensor.dtype))
        told = self._told("rows", name, carried, carried.shape[1:], size)
        with tf.device(self._where(carried)):
            rows = tf.raw_ops.CollectiveGatherV2(
                input=carried, ordering_token=[self._order.handle], **told
            )
        return tf.cast(rows, tensor.dtype)

    def _first(self, tensor: Any, name: str) -> Any:
        """The bits of rank 0's: also a zero keeps its sign."""
        tf = self._tf
        shape = tensor.shape
        carried = tf.cast(tf.reshape(tensor, [-1]), self._carried_as(tensor.dtype))
        told = self._told("first", name, carried, carried.shape)
        with tf.device(self._where(carried)):
            if self.rank == 0:
                value = tf.raw_ops.CollectiveBcastSendV2(input=carried, **told)
            else:
                value = tf.raw_ops.CollectiveBcastRecvV2(
                    T=carried.dtype, shape=tf.shape(carried), **told
                )
        return tf.reshape(tf.cast(value, tensor.dtype), shape)

    def _told(
        self, kind: str, name: str, tensor: Any, shape: Any, size: Any = 0
    ) -> dict[str, Any]:
        """What an operation is told beside its input."""
        tf = self._tf
        key = self._key(kind, name, tensor.dtype.name, str(shape))
        at_host = self._where(tensor) == self._host
        with tf.device(self._host):
            return {
                "group_size": tf.constant(self.size),
                "group_key": tf.constant(_HOSTS if at_host else _ACCELERATORS),
                "instance_key": tf.constant(key) + size,
                "communication_hint": "auto" if at_host else "nccl",
            }

    def _key(self, *what: Any) -> int:
        """The same number for the same operation, another one for each other."""
        key = zlib.crc32(repr(what).encode()) % (2**31 // _SIZES)
        while self._keys.setdefault(key, what) != what:
            key = (key + 1) % (2**31 // _SIZES)
        return key * _SIZES

    def _where(self, tensor: Any) -> str:
        """Whole numbers are few, and TensorFlow has them in the host's memory."""
        return self._device if tensor.dtype.is_floating else self._host

    def _carried_as(self, dtype: Any) -> Any:
        """A type that the operations know, which holds all values of another."""
        tf = self._tf
        if dtype.is_floating or dtype in (tf.int32, tf.int64):
            return dtype
        if not (dtype.is_integer or dtype.is_bool):
            raise TypeError(f"TensorFlow has no collective operations for {dtype.name}")
        return tf.int32 if dtype.is_bool or dtype.size < 4 else tf.int64


def _packs(tensors: Sequence[Any]) -> list[list[int]]:
    """Which tensors travel together, by their places; those of one type only."""
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for place, tensor in enumerate(tensors):
        count = tensor.shape.num_elements()
        if count == 0:
            continue
        taken = math.inf if count is None else count * tensor.dtype.size
        if taken > _SMALL_BYTES:
            packs.append([place])
            continue
        pack, filled = open_packs.get(tensor.dtype, (None, 0))
        if pack is None or filled + taken > _PACK_BYTES:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(place)
        open_packs[tensor.dtype] = (pack, filled + int(taken))
    return packs
