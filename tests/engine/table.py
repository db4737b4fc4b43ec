"""Writes docs/compatibility.md from a run of every row.

PYTHONPATH=tests python -m engine.table
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.registry import STEPS_ONLY, Row
from engine.rows import ROWS
from engine.running import Result, in_processes

__all__ = ["DOCUMENT", "HEAD", "entry", "render", "title"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """\
<!-- Generated: PYTHONPATH=tests python -m engine.table. A test checks it. -->
# What works under oomrun

Each row is a small training that is run twice, by plain Keras and with oomrun's
engine in place, from the same seeds. Everything that Keras reports is compared:
weights, the optimizer's variables, the whole history, evaluations, predictions. Batches
of 8, 8 and 6 samples are trained in passes of at most 3, and so are those of validation
and prediction.

- **works**: the same numbers, and nothing to be said;
- **works with a note**: the run gives the note shown; where it says that batches are
  not cut, memory can only be saved by other means;
- **refused**: the script ends with the message shown.

*cut*: whether training batches were cut (—: not meant to be). *alike to*: how far
numbers may be apart, relative to their norm (0: bit for bit; —: not comparable, and the
note says why).
"""


def render(rows: Iterable[Row], result_of: Callable[[Row], Result]) -> str:
    """The document."""
    lines = [HEAD]
    for name, members in itertools.groupby(rows, key=lambda row: row.section):
        lines.append(f"## {name}\n")
        lines.append("| way of use | under oomrun | cut | alike to |")
        lines.append("|---|---|---|---|")
        lines += [entry(row, result_of(row)) for row in members]
        lines.append("")
    return "\n".join(lines)


def title(row: Row) -> str:
    """The row's first cell."""
    text = f"{row.title} ({row.remark})" if row.remark else row.title
    return text.replace("|", "/")


def entry(row: Row, found: Result) -> str:
    """The row's line in the table."""
    cut = "yes" if found.cut else "—" if row.micro is None else "no"
    cells = (title(row), _verdict(found).replace("|", "/"), cut, _alike(row, found))
    return f"| {' | '.join(cells)} |"


def _alike(row: Row, found: Result) -> str:
    if row.differs == STEPS_ONLY or found.refused:
        return "—"
    return f"{row.tolerance:.0e}".replace("0e+00", "0").replace("e-0", "e-")


def _verdict(found: Result) -> str:
    if found.refused:
        return f"**refused**: {found.refused.splitlines()[0]}"
    notes = [f"`{code}`: {text}." for code, text in sorted(found.notes.items())]
    return " ".join([f"**{found.verdict}**", *notes])


def main() -> int:
    """Runs every row and writes the document."""
    with in_processes(ROWS) as results:
        text = render(ROWS, lambda row: results[row.id].result())
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
