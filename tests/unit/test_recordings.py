"""Which sizes are recorded, so that what they ask for tells of others."""

from __future__ import annotations

import pytest
import tensorflow as tf

from oomrun.core.convolutions import Buffer
from oomrun.core.plan import DevicePlan, Plan
from oomrun.worker.recordings import Recordings

MIB = 2**20


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Of a model with a weight of 31 elements, on a CPU device with a limit."""
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "true")
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "120")
    limit = 120 * MIB
    device = DevicePlan(id="cpu:0", kind="cpu", limit_bytes=limit, budget_bytes=limit)
    plan = Plan(
        strategy="single", strategy_reason="", global_batch_size=None,
        memory_mode="limit", devices=(device,),
    )  # fmt: skip
    return Recordings(plan, [tf.zeros([31])], records=True)


@pytest.mark.parametrize(
    ("wanted", "tried"),
    [(36, 29), (15, 13), (4, 4), (96, 96), (200, 200)],
)
def test_a_prime_that_divides_no_weight(
    wanted: int, tried: int, recordings: Recordings
) -> None:
    assert recordings.size_to_try(wanted, 96) == tried


@pytest.mark.parametrize(
    ("buffer", "tried"),
    [(1092 * 19_200 * 4, 11), (7 * 11 * 17 * 256, 13), (11 * 13 * 256, 15)],
)
def test_nor_a_buffer(buffer: int, tried: int, recordings: Recordings) -> None:
    """One of 1,092 samples at a time was taken for a tensor of passes of 13."""
    recordings.buffers = (Buffer(bytes=buffer, least_samples=2),)
    assert recordings.size_to_try(15, 1001) == tried
