"""How long a worker may be silent."""

from __future__ import annotations

import pytest

from oomrun.core.patience import silence_s
from oomrun.core.spec import AUTO, Auto


@pytest.mark.parametrize(
    ("hang_after", "of_group", "longest_s", "expected"),
    [
        (None, True, 1.0, None),
        (90.0, False, None, 90.0),  # from the start on
        (90.0, True, 3600.0, 90.0),  # who says so is obeyed
        (AUTO, False, 1.0, None),
        (AUTO, True, None, None),  # the first step may take as long as it takes
        (AUTO, True, 0.2, 1800.0),
        (AUTO, True, 120.0, 2400.0),
    ],
)
def test_silence(
    hang_after: Auto | float | None,
    of_group: bool,
    longest_s: float | None,
    expected: float | None,
) -> None:
    found = silence_s(hang_after, of_group=of_group, longest_s=longest_s)
    assert found == expected
