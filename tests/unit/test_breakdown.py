"""What a predicted peak is made of: it adds up, whatever is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import breakdown
from oomrun.core import events as ev
from oomrun.core.memory import MemoryModel, Peak
from scenarios import MIB
from scenarios import state_measured as seen


def test_every_kind_is_what_was_measured() -> None:
    found = breakdown.explain(
        seen(),
        16,
        Peak(bytes=200 * MIB, high_bytes=210 * MIB),
        limit_bytes=300 * MIB,
        budget_bytes=276 * MIB,
    )
    assert found.parts == breakdown.Parts(
        trained=10 * MIB,
        fixed=2 * MIB,
        optimizer=20 * MIB,
        metrics=1 * MIB,
        input=64 * MIB,
        script=3 * MIB,
        gradients=10 * MIB,
        activations=80 * MIB,
        surplus=10 * MIB,
    )
    assert (found.margin_bytes, found.unused_bytes, found.headroom_bytes) == (
        10 * MIB, 66 * MIB, 24 * MIB,
    )  # fmt: skip


def test_a_peak_below_the_graph_s_cuts_the_graph_s_figure() -> None:
    found = breakdown.explain(seen(), 16, Peak(bytes=150 * MIB, high_bytes=150 * MIB))
    assert found.parts.activations == 40 * MIB
    assert found.parts.surplus == 0
    assert found.bytes_per_sample == 40 * MIB / 16
    assert (found.unused_bytes, found.headroom_bytes) == (None, None)


@pytest.mark.parametrize(
    ("size", "activations"), [(16, 80), (32, 160), (64, 320), (8, 40), (128, 640)]
)
def test_activations_lie_on_the_graph_s_line(size: int, activations: int) -> None:
    found = breakdown.explain(seen(), size, Peak(bytes=2**40, high_bytes=2**40))
    assert found.parts.activations == activations * MIB
    assert found.bytes_per_sample == 5 * MIB


def test_a_device_that_counts_nothing_and_a_step_without_a_graph() -> None:
    known = seen(rest_bytes=None, graph_sizes=(), graph_peaks=(), graph_activations=())
    found = breakdown.explain(known, 16, Peak(bytes=120 * MIB, high_bytes=120 * MIB))
    assert (found.parts.script, found.parts.activations) == (0, 0)
    assert found.parts.surplus == (120 - 107) * MIB
    assert found.bytes_per_sample is None


def test_the_graph_s_own_prediction_is_state_gradients_batch_and_graph() -> None:
    peak = breakdown.known_from_graph(seen()).predict(16)
    assert peak is not None
    assert peak.bytes == (10 + 2 + 20 + 1 + 64 + 10 + 142) * MIB
    assert peak == MemoryModel(
        state_bytes=107 * MIB, static={64: 394 * MIB, 16: 142 * MIB}
    ).predict(16)


COUNT = st.integers(-5, 2**40)
SIZES = st.lists(COUNT, max_size=4).map(tuple)


@given(
    st.builds(
        seen,
        trained_bytes=COUNT, fixed_bytes=COUNT, optimizer_bytes=COUNT,
        metrics_bytes=COUNT, input_bytes=COUNT, rest_bytes=st.none() | COUNT,
        graph_sizes=SIZES, graph_peaks=SIZES, graph_activations=SIZES,
    ),
    st.integers(0, 2**31),
    COUNT,
    COUNT,
    st.none() | COUNT,
    st.none() | COUNT,
)  # fmt: skip
def test_it_always_adds_up(
    known: ev.StateMeasured,
    size: int,
    likely: int,
    high: int,
    limit: int | None,
    budget: int | None,
) -> None:
    peak = Peak(bytes=likely, high_bytes=high)
    found = breakdown.explain(known, size, peak, limit_bytes=limit, budget_bytes=budget)
    told = breakdown.to_json(found)
    assert all(count >= 0 for count in told["parts"].values())
    assert sum(told["parts"].values()) == found.peak_bytes == max(0, likely)
    upper = found.peak_bytes + found.margin_bytes
    # Within the budget where the peak is: what is above is counted, not needed.
    within = budget is not None and likely <= budget < high
    assert upper == (budget if within else high)
    if found.unused_bytes is not None and found.headroom_bytes is not None:
        assert upper + found.unused_bytes + found.headroom_bytes == limit
    else:
        assert limit is None or budget is None
