"""The page of faults names each cell of the matrix, and tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import matrix
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fault-matrix.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("cell", matrix.CELLS)
def test_each_cell_is_named(cell: str) -> None:
    assert f"`{cell}`" in PAGE


@pytest.mark.parametrize("name", NAMED)
def test_each_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in functions


def test_a_draw_is_of_short_cells_and_hangs_on_the_seed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv(matrix.SEED, seed)
        draws.append(matrix.drawn())
    assert draws[0] == draws[2] != draws[1]
    assert all(draw <= set(matrix.CELLS) - {"hang"} for draw in draws)
