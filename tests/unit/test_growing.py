"""Going back to a larger micro-batch, as a table."""

from __future__ import annotations

import pytest

from oomrun.core.growing import Lost, at_checkpoint, lost

MIB = 2**20


def waiting(**changed: int) -> Lost:
    fields = {"size": 64, "rest_bytes": 10 * MIB, "slack_bytes": 2 * MIB} | changed
    return Lost(**fields)


@pytest.mark.parametrize(
    ("in_use", "refused_at", "takes", "is_lost"),
    [
        (30 * MIB, None, None, True),  # the script holds more than when it ran
        (11 * MIB, None, None, False),  # it was the step itself: it would be again
        (10 * MIB, 50 * MIB, 80 * MIB, True),  # others were on the device
        (10 * MIB, 79 * MIB, 80 * MIB, False),
        (10 * MIB, 50 * MIB, None, False),
    ],
)
def test_what_is_waited_for(
    in_use: int, refused_at: int | None, takes: int | None, is_lost: bool
) -> None:
    found = lost(
        64, rest_bytes=10 * MIB, in_use_bytes=in_use, budget_bytes=100 * MIB,
        refused_at_bytes=refused_at, takes_bytes=takes,
    )  # fmt: skip
    assert found == (waiting() if is_lost else None)


def test_memory_must_be_back_at_checkpoints_in_a_row() -> None:
    one = at_checkpoint(waiting(), 12 * MIB)
    assert (one.seen, one.back) == (1, False)
    gone = at_checkpoint(one, 13 * MIB)
    assert gone.seen == 0
    again = at_checkpoint(at_checkpoint(gone, 9 * MIB), 9 * MIB)
    assert again.back


def test_each_time_in_vain_doubles_the_wait() -> None:
    waits, before = [], None
    for _ in range(12):
        before = lost(
            64, rest_bytes=0, in_use_bytes=50 * MIB, budget_bytes=100 * MIB,
            before=before,
        )  # fmt: skip
        assert before is not None
        waits.append(before.wait)
    assert waits[:4] == [2, 4, 8, 16]
    assert waits[-1] == 1024
    other = lost(
        32, rest_bytes=0, in_use_bytes=50 * MIB, budget_bytes=100 * MIB, before=before
    )
    assert other is not None
    assert other.wait == 2
