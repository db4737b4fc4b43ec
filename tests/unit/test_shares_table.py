"""Shares of a global batch, case by case."""

from __future__ import annotations

import pytest

from oomrun.core.shares import Replica, Speed, share_out

EVEN = Speed(pass_s=0.0, sample_s=1.0)
COSTLY = Speed(pass_s=10.0, sample_s=1.0)
FAST = Speed(pass_s=0.0, sample_s=0.5)


def sizes(*fits: int, speed: Speed | None = None) -> list[Replica]:
    return [Replica(size, speed) for size in fits]


@pytest.mark.parametrize(
    ("samples", "replicas", "expected"),
    [
        pytest.param(96, sizes(96, 96), [(48, 48), (48, 48)], id="room for all"),
        pytest.param(97, sizes(97, 97, 97), [(33, 33), (32, 32), (32, 32)], id="odd"),
        pytest.param(96, sizes(64, 32), [(64, 64), (32, 32)], id="one pass each"),
        pytest.param(96, sizes(90, 20), [(76, 76), (20, 20)], id="nearly equal"),
        pytest.param(96, sizes(16, 4), [(48, 16), (48, 4)], id="no speed measured"),
        pytest.param(96, sizes(16, 0), [(96, 16), (0, 0)], id="one too small"),
        pytest.param(1, sizes(8, 8), [(1, 1), (0, 0)], id="one sample"),
        pytest.param(0, sizes(8, 8), [(0, 0), (0, 0)], id="no sample"),
        pytest.param(100, sizes(32), [(100, 25)], id="passes of one size"),
        pytest.param(
            96, sizes(16, 4, speed=EVEN), [(48, 16), (48, 4)],
            id="memory alone is no reason",
        ),
        pytest.param(
            100, [Replica(50, FAST), Replica(50, EVEN)], [(67, 34), (33, 33)],
            id="twice as fast",
        ),
        pytest.param(
            96, sizes(96, 8, speed=COSTLY), [(64, 64), (32, 8)],
            id="passes cost: who needs few takes more",
        ),
        pytest.param(
            10, [Replica(10, EVEN), Replica(10, Speed(20.0, 1.0))], [(10, 10), (0, 0)],
            id="not worth one pass",
        ),
        pytest.param(
            96, [Replica(16, FAST), Replica(16)], [(48, 16), (48, 16)],
            id="one speed says nothing",
        ),
    ],
)  # fmt: skip
def test_shares(
    samples: int, replicas: list[Replica], expected: list[tuple[int, int]]
) -> None:
    parts = share_out(samples, replicas).parts
    assert [(part.share, part.micro_batch_size) for part in parts] == expected


@pytest.mark.parametrize(
    ("samples", "replicas", "reason"),
    [
        (96, sizes(96, 96), "equal shares, each in one pass"),
        (96, sizes(64, 32), "shares by what fits"),
        (96, sizes(16, 4), "not every device's speed was measured"),
        (96, sizes(16, 4, speed=EVEN), "shares by speed"),
        (96, sizes(16, 0), "not one sample fits on 1 of the 2 devices"),
    ],
)
def test_why(samples: int, replicas: list[Replica], reason: str) -> None:
    assert reason in share_out(samples, replicas).reason


def test_the_slowest() -> None:
    found = share_out(96, sizes(96, 8, speed=COSTLY))
    assert found.slowest_s == pytest.approx(74.0)
    assert share_out(96, sizes(96, 8)).slowest_s is None
