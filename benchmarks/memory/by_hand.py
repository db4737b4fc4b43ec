"""Looking for a micro-batch as people do without oomrun: one process, trial and error.

    PYTHONPATH=tests python -m benchmarks.memory.by_hand cnn adam doubling

Covers: the ways to search, as functions of a trial; the trials of one of them in this
process, and the first step of the job at the size that was found. Does not cover: the
limit, which is set around this process (``benchmarks.search``).

A trial is a step of the engine over a batch of the size in question, with operations
run as oomrun would run them, traced once for all sizes: no way is slower, or finds
less, for a worse engine. The data of the job are in the device's memory as in training,
so that what is found will train; weights are put back at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["WAYS", "Attempt"]

#: Takes so many steps at a size; False: memory ran out.
Attempt = Callable[[int, int], bool]

_STEPS = 3  # of a trial of a size that is not the last yet


def doubling(most: int, attempt: Attempt) -> int:
    """From 2 up, until one does not fit: the last that did."""
    found, _ = _doubled(most, attempt)
    return found


def bisection(most: int, attempt: Attempt) -> int:
    """Doubling, then halving the gap until there is none."""
    found, failed = _doubled(most, attempt)
    while failed - found > 1:
        middle = (found + failed) // 2
        if attempt(middle, _STEPS):
            found = middle
        else:
            failed = middle
    return found


def _doubled(most: int, attempt: Attempt) -> tuple[int, int]:
    """The last that fitted, and the first that did not (or is too large)."""
    found, size = 0, min(2, most)
    while size > found:
        if not attempt(size, _STEPS):
            return found, size
        found, size = size, min(2 * size, most)
    return found, most + 1


def tenths_less(most: int, attempt: Attempt) -> int:
    """From the whole batch down, to nine tenths each time: the first that fits."""
    return _shrunk(most, attempt, lambda size: size * 9 // 10)


def halving(most: int, attempt: Attempt) -> int:
    """From the whole batch down, to a half each time: the first that fits."""
    return _shrunk(most, attempt, lambda size: size // 2)


def _shrunk(most: int, attempt: Attempt, smaller: Callable[[int], int]) -> int:
    # Training itself is the trial: its first step shows it.
    size = most
    while size and not attempt(size, 1):
        size = smaller(size)
    return size


WAYS: dict[str, Callable[[int, Attempt], int]] = {
    "doubling": doubling,
    "doubling, bisection": bisection,
    "0.9x": tenths_less,
    "halving": halving,
}


def search(entry_name: str, optimizer: str, way: str) -> dict[str, Any]:
    """Searches, and takes the first step of the job at the size found.

    TensorFlow must not have touched a device in this process before.
    """
    from benchmarks.zoo import ZOO
    from engine.harness import Engine
    from oomrun.core import events as ev
    from oomrun.worker import pool
    from oomrun.worker.engine import keeping

    pool.gather_on_first_use()
    entry = ZOO[entry_name]
    engine = Engine(Path(tempfile.mkdtemp()))
    model = entry.build(optimizer)
    tried: list[dict[str, Any]] = []
    began = time.time()
    attempt = _attempts(model, entry, tried)
    with keeping.left_as_it_was(keeping.variables_of(model)):
        found = WAYS[way](entry.batch, attempt)
    del attempt  # and the data it holds
    moments: list[float] = []
    with engine.on(found):
        entry.fit(model, 1, [_noting(moments)])
    ooms = sum(isinstance(event, ev.OomOccurred) for event in engine.close())
    return {
        "began": began,
        "first_step_s": round(moments[0] - began, 2),
        "trials": len(tried),
        "ooms": sum(not trial["ran"] for trial in tried) + ooms,
        "micro_batch": engine.ran[-1].size,
        "tried": tried,
    }


def _attempts(model: Any, entry: Any, tried: list[dict[str, Any]]) -> Attempt:
    """Trials of a model on the first rows of its data; notes them."""
    import keras
    import tensorflow as tf

    from oomrun.worker import building
    from oomrun.worker.engine import executor, slicing
    from oomrun.worker.engine.step import StepFunction

    # As `fit` has it: all of them, and the global batch that is being trained.
    data = slicing.as_tensors(entry.data(2 * entry.batch, 0))
    batch = slicing.cut(data, 0, entry.batch)
    building.from_batch(model, slicing.cut(batch, 0, 2))
    function = StepFunction(model)
    function.trace_for(
        keras.tree.map_structure(
            lambda value: tf.TensorSpec([None, *value.shape[1:]], value.dtype), data
        )
    )
    if executor.suits(function.graph_function().graph):
        function.run_in_order(whole=True)

    def attempt(size: int, steps: int) -> bool:
        began, ran = time.time(), True
        few = batch if size == entry.batch else slicing.cut(batch, 0, size)
        try:
            for _ in range(steps):
                function.run(few, size, size)
        except tf.errors.ResourceExhaustedError:
            ran = False
        seconds = round(time.time() - began, 2)
        tried.append({"size": size, "ran": ran, "seconds": seconds})
        return ran

    return attempt


def _noting(moments: list[float]) -> Any:
    import keras

    class Moments(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            moments.append(time.time())

    return Moments()


if __name__ == "__main__":
    print(json.dumps(search(*sys.argv[1:])))
