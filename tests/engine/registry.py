"""The rows of docs/compatibility.md: how each is declared.

A row is a function that trains exactly as a user would and returns what to compare:
models (their weights and their optimizers' variables), histories, numbers, arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ROWS", "STEPS_ONLY", "Row", "row", "section"]

#: For ``differs``: all numbers may differ but the count of optimizer steps.
STEPS_ONLY = "^(?!.*:iteration$)"

#: All rows by id, in the document's order.
ROWS: dict[str, Row] = {}
_section = [""]


@dataclass(frozen=True)
class Row:
    """One way of using Keras.

    Attributes:
        run: trains, in a folder of its own, and returns what to compare.
        micro: samples a pass in training; None: batches are not cut on purpose.
        evaluate: samples a pass in evaluation and prediction; None: not cut.
        notes: codes of the notes that the engine must give.
        refused: text that the error of the managed run must hold; empty: no error.
        tolerance: how far numbers may be apart, relative to their norm; 0: bit for bit.
        differs: a pattern of the names of numbers that need not be those of plain
            Keras, since a note says so; empty: all are.
        floatx: Keras's default float type while it runs.
        cuts: whether a batch must have been cut, as ``micro`` asks for.
        remark: what a reader of the table should know beyond the notes.
        slow: left to ``make chaos``: another row goes the same way through the engine.
    """

    id: str
    section: str
    title: str
    run: Callable[[Path], Any] = field(repr=False)
    micro: int | None
    evaluate: int | None
    notes: tuple[str, ...]
    refused: str
    tolerance: float
    differs: str
    floatx: str
    cuts: bool
    remark: str
    slow: bool


def section(title: str) -> None:
    """Begins a section of the table; the rows that follow belong to it."""
    _section[0] = title


def row(
    title: str,
    *,
    micro: int | None = 3,
    evaluate: int | None = 3,
    notes: tuple[str, ...] = (),
    refused: str = "",
    tolerance: float = 1e-10,
    differs: str = "",
    floatx: str = "float64",
    cuts: bool = True,
    remark: str = "",
    slow: bool = False,
) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Declares a row; see ``Row``."""

    def declare(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        name = run.__name__
        if name in ROWS:
            raise ValueError(f"two rows are called {name}")
        ROWS[name] = Row(
            id=name,
            section=_section[0],
            title=title,
            run=run,
            micro=micro,
            evaluate=evaluate,
            notes=notes,
            refused=refused,
            tolerance=tolerance,
            differs=differs,
            floatx=floatx,
            cuts=cuts and micro is not None,
            remark=remark,
            slow=slow,
        )
        return run

    return declare
