"""Runs a row plain and under the engine, and says what came of it.

The verdict is found here from what happened, not declared: whether the managed run
raised, whether its numbers are those of plain Keras, which notes it gave.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from engine import comparing, harness
from engine.registry import Row
from oomrun.core import events as ev
from precision import precision

__all__ = ["SEED", "Result", "in_processes", "result", "seeded"]

SEED = 11


@dataclass(frozen=True)
class Result:
    """What came of one row.

    Attributes:
        differences: numbers that are not those of plain Keras.
        notes: the engine's notes, text by code.
        error: the traceback of what either run raised.
        refused: the managed run's error, where plain Keras raised none.
        ran: what went through the engine.
    """

    differences: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    error: str = ""
    refused: str = ""
    ran: tuple[harness.Ran, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether a training batch was cut."""
        return any(ran.cut for ran in self.ran if ran.phase == "gradients")

    @property
    def verdict(self) -> str:
        """One of: works, works with a note, refused, differs silently, fails."""
        if self.refused:
            return "refused"
        if self.error:
            return "fails"
        if self.notes:
            return "works with a note"
        return "differs silently" if self.differences else "works"


def result(row: Row) -> Result:
    """Runs ``row`` both ways."""
    # Keras warns of much that these scripts do on purpose.
    warnings.simplefilter("ignore")
    try:
        with seeded(row.floatx), tempfile.TemporaryDirectory() as folder:
            wanted = comparing.numbers(row.run(Path(folder)))
    except Exception:
        return Result(error=traceback.format_exc())
    found: dict[str, Any] = {}
    error = refused = ""
    with tempfile.TemporaryDirectory() as checkpoints:
        engine = harness.Engine(Path(checkpoints))
        try:
            with (
                seeded(row.floatx),
                tempfile.TemporaryDirectory() as folder,
                engine.on(row.micro, row.evaluate),
            ):
                found = comparing.numbers(row.run(Path(folder)))
        except Exception as raised:
            error = traceback.format_exc()
            refused = f"{type(raised).__name__}: {raised}"
        events = engine.close()
    different = [] if error else comparing.differences(found, wanted, row.tolerance)
    return Result(
        differences=tuple(different),
        notes={e.code: e.text for e in events if isinstance(e, ev.Noted)},
        error=error,
        refused=refused,
        ran=tuple(engine.ran),
    )


@contextmanager
def in_processes(
    rows: Iterable[Row],
) -> Iterator[dict[str, concurrent.futures.Future[Result]]]:
    """The results of ``rows`` to come, by id, from a process for each core."""
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, 8),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_two_devices,
    )
    try:
        yield {row.id: pool.submit(_result_of, row.id) for row in rows}
    finally:
        pool.shutdown(cancel_futures=True)


def _two_devices() -> None:
    """A second CPU device, for the rows that train on two."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )


def _result_of(name: str) -> Result:
    from engine.rows import ROWS

    return result(next(row for row in ROWS if row.id == name))


@contextmanager
def seeded(floatx: str) -> Iterator[None]:
    """Keras as in a new process that sets its seeds first."""
    keras.backend.clear_session(free_memory=False)
    with precision(floatx):
        keras.utils.set_random_seed(SEED)
        try:
            yield
        finally:
            tf.random.set_seed(None)
