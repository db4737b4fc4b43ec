"""Everything a step may change, kept on the host and put back after a trial."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np

from oomrun.worker.engine import attributes
from oomrun.worker.engine.applying import optimizers_of
from oomrun.worker.engine.reading import as_array, reference, references

__all__ = [
    "bytes_by_kind", "bytes_of", "copied", "held", "host_copies", "host_copy",
    "left_as_it_was", "variables_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]

# What is not in the host's memory is brought there, then copied, and let go.
_FETCHED_AT_ONCE = 8 * 2**20
# One core copies at less than what memory can do; more than four gain nothing.
_MOST_THREADS = 4


def variables_of(model: Any) -> list[Any]:
    """Weights, layer state, seeds, the optimizers' slots and metrics, each once.

    In a fixed order: checkpoints are written and read by it.
    """
    found: dict[int, Any] = {}
    for variable in [
        *model.variables,
        *(v for optimizer in optimizers_of(model) for v in optimizer.variables),
        *model.metrics_variables,
    ]:
        found.setdefault(id(variable.value), variable)
    return list(found.values())


def bytes_of(variables: Iterable[Any]) -> int:
    """Bytes of the values of Keras variables."""
    return sum(v.value.shape.num_elements() * v.value.dtype.size for v in variables)


def bytes_by_kind(model: Any) -> dict[str, int]:
    """Bytes of ``variables_of`` a model, by what they are for."""
    optimizers = optimizers_of(model)
    kinds = {
        "trained_bytes": model.trainable_variables,
        "optimizer_bytes": [v for own in optimizers for v in own.variables],
        "fixed_bytes": model.variables,
    }
    left = {id(variable.value): variable for variable in variables_of(model)}
    found = {}
    for kind, variables in kinds.items():
        own = [left.pop(id(variable.value), None) for variable in variables]
        found[kind] = bytes_of(variable for variable in own if variable is not None)
    return {**found, "metrics_bytes": bytes_of(left.values())}


@contextlib.contextmanager
def left_as_it_was(variables: Sequence[Any], model: Any = None) -> Iterator[None]:
    """Puts the values that the variables have now back at the end.

    Args:
        variables: what a step writes.
        model: whose attributes are put back as well (``attributes.py``); None: none.
    """
    # On the host: the device has no room for a second copy of everything.
    before = host_copies(variables)
    nothing = contextlib.nullcontext()
    try:
        with nothing if model is None else attributes.left_as_they_were(model):
            yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def host_copy(value: Any) -> Array:
    """The value of a tensor or variable, in memory of its own."""
    return np.array(as_array(reference(value)))


def host_copies(variables: Sequence[Any], into: Sequence[Array] = ()) -> list[Array]:
    """The values of Keras variables, in memory of their own.

    Args:
        variables: what to copy.
        into: what an earlier call has returned, to copy into again where it has the
            same shape and type: taking new memory is most of the time.
    """
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    found: list[Array] = []
    waiting: list[tuple[Array, Array]] = []
    fetched = 0
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        for tensor, old in zip_longest(held(variables), into[: len(variables)]):
            value = as_array(tensor)
            found.append(_room_for(value, old))
            waiting.append((_flat(found[-1]), _flat(value)))
            fetched += 0 if "CPU" in tensor.device else value.nbytes
            if fetched >= _FETCHED_AT_ONCE:
                _copy_all(waiting, pool, threads)
                waiting.clear()
                fetched = 0
        _copy_all(waiting, pool, threads)
    return found


def _copy_all(
    pairs: Sequence[tuple[Array, Array]], pool: ThreadPoolExecutor, threads: int
) -> None:
    """Copies in ``threads`` threads, of which this is one."""
    own, *others = _parts(pairs, threads)
    copying = [pool.submit(_copy, part) for part in others]
    _copy(own)
    for part in copying:
        part.result()


def held(variables: Sequence[Any]) -> list[Any]:
    """The values of Keras variables as tensors that stay as they are (``reading``)."""
    return references([variable.value for variable in variables])


def copied(tensors: list[Any], into: Sequence[Array] = ()) -> list[Array]:
    """Copies of what ``held`` has returned, each of which is let go of then.

    By one thread: this is for beside a training. ``tensors`` is empty afterwards.

    Args:
        tensors: nobody else should hold them.
        into: as of ``host_copies``.
    """
    tensors.reverse()
    found = []
    for index in range(len(tensors)):
        value = as_array(tensors.pop())
        found.append(_room_for(value, into[index] if index < len(into) else None))
        np.copyto(found[-1], value)
    return found


def _room_for(value: Array, old: Array | None) -> Array:
    if old is not None and (old.shape, old.dtype) == (value.shape, value.dtype):
        return old
    return np.empty_like(value)


def _flat(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _copy(pairs: Sequence[tuple[Array, Array]]) -> None:
    for to, value in pairs:
        np.copyto(to, value)


def _parts(
    pairs: Sequence[tuple[Array, Array]], count: int
) -> list[list[tuple[Array, Array]]]:
    """``pairs`` cut into ``count`` lists of as many bytes."""
    each = -(-sum(to.size for to, _ in pairs) // count)
    parts: list[list[tuple[Array, Array]]] = [[]]
    room = each
    for to, value in pairs:
        done = 0
        while done < to.size:
            if room == 0:
                parts.append([])
                room = each
            end = done + min(room, to.size - done)
            parts[-1].append((to[done:end], value[done:end]))
            room -= end - done
            done = end
    return parts
