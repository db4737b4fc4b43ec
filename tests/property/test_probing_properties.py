"""Whatever a model needs, the search for its micro-batch neither fails nor wastes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from oomrun.core.memory import MemoryModel
from oomrun.core.probing import Asked, NothingFits, Settled, Try, next_step

TRIALS = 3
HEADROOM = 0.08


@dataclass(frozen=True)
class Machine:
    """A model on a device: what its steps need, and what its graph says of that."""

    limit: int
    rest: int
    constant: int
    slope: int
    static_share: float
    noise: float
    seed: int

    def need(self, size: int) -> float:
        return self.rest + self.constant + self.slope * size

    def peak(self, size: int, draw: random.Random) -> int:
        more = 1 - self.noise + 2 * self.noise * draw.random()
        return int(self.rest + (self.need(size) - self.rest) * more)

    def static(self, size: int) -> int:
        return int((self.constant + self.slope * size) * self.static_share)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    limit = draw(st.integers(10**7, 10**11))
    rest = int(limit * draw(st.floats(0.001, 0.5)))
    constant = int(limit * draw(st.floats(0, 0.1)))
    return Machine(
        limit=limit,
        rest=rest,
        constant=constant,
        slope=max(1, int(limit * draw(st.floats(1e-5, 0.02)))),
        # What was measured on real models: 1.4 to 2.1 times as much as the graph says.
        static_share=draw(st.floats(1 / 2.15, 1 / 1.2)),
        noise=draw(st.floats(0, 0.02)),
        seed=draw(st.integers(0, 2**16)),
    )


def search(
    machine: Machine, samples: int, crowded_above: float = math.inf
) -> tuple[int, list[int], bool]:
    """The size that was found, the sizes that were tried, whether one failed."""
    draw = random.Random(machine.seed)
    budget = int(machine.limit * (1 - HEADROOM))
    some = sorted({max(1, samples // 8), samples})
    static = {size: machine.static(size) for size in some}
    measured: dict[int, int] = {}
    tried: list[int] = []
    while True:
        known = MemoryModel(state_bytes=machine.rest, measured=measured, static=static)
        step = next_step(
            known,
            Asked(
                samples=samples,
                at_most=samples,
                budget_bytes=budget,
                crowded=min((n for n in tried if n > crowded_above), default=None),
                trials_left=TRIALS - len(tried),
            ),
        )
        assert not isinstance(step, NothingFits)
        if isinstance(step, Settled):
            return step.size, tried, False
        assert isinstance(step, Try)
        tried.append(step.size)
        peaks = [machine.peak(step.size, draw) for _ in range(3)]
        if max(peaks) > machine.limit:
            return 0, tried, True
        measured[step.size] = max(peaks)


@given(machines(), st.integers(1, 4096))
def test_the_search_is_short_safe_and_near_the_largest(
    machine: Machine, samples: int
) -> None:
    budget = machine.limit * (1 - HEADROOM)
    largest = min(samples, int((budget - machine.need(0)) / machine.slope))
    if largest < 1:
        return  # nothing fits, or only above the budget: other tests
    size, tried, failed = search(machine, samples)
    assert not failed, f"ran out of memory at one of {tried}"
    assert len(tried) <= TRIALS
    assert len(set(tried)) == len(tried)
    assert 1 <= size <= samples
    assert machine.need(size) * (1 + machine.noise) <= machine.limit
    # A fifth below the budget at worst, or a sample: small sizes come in large steps.
    assert size >= 0.8 * largest - 1


@given(machines(), st.integers(1, 4096), st.floats(0, 1))
def test_no_size_is_trained_with_that_was_seen_to_be_crowded(
    machine: Machine, samples: int, share: float
) -> None:
    budget = machine.limit * (1 - HEADROOM)
    largest = min(samples, int((budget - machine.need(0)) / machine.slope))
    if largest < 2:
        return
    above = max(1.0, share * largest)
    size, tried, failed = search(machine, samples, crowded_above=above)
    assert not failed, f"ran out of memory at one of {tried}"
    assert len(tried) <= TRIALS
    assert size not in [n for n in tried if n > above]
    # A size that ran, and was not crowded, is not given away for a smaller one.
    fitting = [n for n in tried if n <= above and machine.need(n) * 1.03 <= budget]
    assert size >= max(fitting, default=1)
