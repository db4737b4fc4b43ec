"""docs/compatibility.md: every row, run plain and under the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from engine import table
from engine.registry import Row
from engine.rows import ROWS
from engine.running import Result, in_processes


@pytest.fixture(scope="module")
def result_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Row], Result]]:
    """A row's result; those of all rows that this session asks for are begun."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    given = [call.params.get("row") for call in calls if call]
    # Tests of others have parameters of that name, too.
    chosen = [row for row in given if isinstance(row, Row)]
    with in_processes(chosen) as results:
        yield lambda row: results[row.id].result()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.id, marks=[pytest.mark.slow] if row.slow else [])
        for row in ROWS
    ],
)
def test_a_row_is_what_it_is_said_to_be(
    row: Row, result_of: Callable[[Row], Result]
) -> None:
    found = result_of(row)
    assert bool(row.refused) == bool(found.error), found.error
    assert row.refused in found.refused
    assert sorted(found.notes) == sorted(row.notes)
    assert not [line for line in found.differences if not _may_differ(row, line)]
    assert found.cut == row.cuts
    evaluated = [ran for ran in found.ran if ran.phase == "evaluate"]
    if row.evaluate is not None and evaluated:
        assert any(ran.cut for ran in evaluated)
    written = table.DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert table.entry(row, found) in written


def _may_differ(row: Row, line: str) -> bool:
    name = line.split(": ")[0]
    return bool(row.differs and row.notes and re.search(row.differs, name))


def test_the_document_holds_these_rows_and_no_other() -> None:
    written = table.DOCUMENT.read_text(encoding="utf-8")
    first = [line.split(" | ")[0] for line in written.splitlines() if " | " in line]
    head = "| way of use"
    assert [cell for cell in first if cell != head] == [
        f"| {table.title(row)}" for row in ROWS
    ]
    assert written.startswith(table.HEAD)
