"""The benchmarks' models train as they are, and the oracle finds what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from benchmarks import oracle
from benchmarks.memory.kept import Kept
from benchmarks.zoo import OPTIMIZERS, ZOO, Entry
from benchmarks.zoo.outcome import Case, Outcome
from hypothesis import given
from hypothesis import strategies as st

MIB = 2**20
FEW = 4

# All optimizers and XLA in turn: one run of each entry is enough to see it train.
WAYS = [
    (name, list(OPTIMIZERS)[place % len(OPTIMIZERS)]) for place, name in enumerate(ZOO)
]


def arrays(data: Any) -> list[Any]:
    return [np.asarray(value) for value in keras.tree.flatten(data)]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def trained(entry: Entry, optimizer: str, *, jit_compile: bool = False) -> Any:
    """The entry's weights before and after a step, and the loss."""
    model = entry.build(optimizer, jit_compile)
    before = model.get_weights()
    model.run_eagerly = not jit_compile  # tracing takes most of the time
    loss = model.train_on_batch(*entry.data(FEW, 0))
    return before, model.get_weights(), float(loss)


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    keras.backend.clear_session()


def test_there_are_enough_kinds() -> None:
    assert len(ZOO) >= 15
    assert all(name == entry.name for name, entry in ZOO.items())


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO)
def test_limits_are_for_a_batch_that_does_not_fit_at_once(entry: Entry) -> None:
    low, middle, high = entry.limits
    assert 60 <= low < middle < high <= 400
    assert 64 <= entry.batch <= 16384


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO)
def test_data_are_those_of_the_seed(entry: Entry) -> None:
    once, again, other = (arrays(entry.data(FEW, seed)) for seed in (1, 1, 2))
    assert all(len(value) == FEW for value in once)
    assert same(once, again)
    assert not same(once, other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), WAYS)
def test_an_entry_trains(name: str, optimizer: str) -> None:
    before, after, loss = trained(ZOO[name], optimizer)
    assert np.isfinite(loss)
    assert not same(before, after)


@pytest.mark.slow
def test_an_entry_trains_alike_by_xla() -> None:
    before, after, loss = trained(ZOO["siamese"], "sgd", jit_compile=True)
    plain_before, _, plain_loss = trained(ZOO["siamese"], "sgd")
    assert same(before, plain_before)
    assert loss == pytest.approx(plain_loss, rel=1e-4)
    assert not same(before, after)


def test_the_policy_is_put_back() -> None:
    before = keras.config.dtype_policy()
    model = ZOO["mixed"].build("adam")
    assert keras.config.dtype_policy() == before
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"


# -- the search ------------------------------------------------------------------------


class Memory:
    """A model that needs what ``needs`` says, and what was tried on it."""

    def __init__(self, needs: Callable[[int], float], limit: float) -> None:
        self.needs, self.limit = needs, limit
        self.tried: dict[int, bool] = {}

    def attempt(self, size: int, steps: int) -> Outcome:
        assert size >= 1
        fits = self.needs(size) <= self.limit
        self.tried[size] = fits
        return Outcome(
            micro=size,
            wanted=steps,
            ended="ran" if fits else "oom",
            peaks=(int(self.needs(size)),) if fits else (),
        )

    def search(self, batch: int) -> int:
        return oracle.search(batch, int(self.limit), self.attempt)


@given(
    batch=st.integers(2, 20_000),
    boundary=st.integers(0, 20_000),
    base=st.integers(0, 300),
    curve=st.floats(0.5, 2.0),
)
def test_the_boundary_is_found_to_three_percent(
    batch: int, boundary: int, base: int, curve: float
) -> None:
    def needs(size: int) -> float:
        return MIB * (base + 100 * (size / max(boundary, 0.5)) ** curve)

    memory = Memory(needs, MIB * (base + 100))
    found = memory.search(batch)
    most = min(boundary, batch)
    assert found <= most
    assert found > most / 1.03 - 1
    assert len(memory.tried) <= 40


def test_sizes_above_and_below_are_tried_too() -> None:
    memory = Memory(lambda size: size * MIB, 200 * MIB)
    found = memory.search(1000)
    above = [size for size in memory.tried if found < size <= found * 1.03**4.5]
    assert len(above) == 4
    for part in (0.125, 0.25, 0.5, 0.75):
        assert memory.tried[int(part * found)]


def test_a_size_that_fits_again_above_the_boundary_is_found() -> None:
    def needs(size: int) -> float:
        # As XLA has it: some larger sizes need less.
        return MIB * (size if size < 206 or size > 212 else 190)

    memory = Memory(needs, 200 * MIB)
    found = memory.search(1000)
    assert 206 <= found <= 212
    assert not any(fits for size, fits in memory.tried.items() if 200 < size < 206)


def test_what_ran_below_all_failures_is_told_apart() -> None:
    def truth(**ran: bool) -> oracle.Truth:
        trials = tuple(
            Outcome(micro=int(size[1:]), wanted=20, ended="ran" if ok else "oom")
            for size, ok in ran.items()
        )
        case = Case(entry="cnn", optimizer="sgd", xla=False, limit_mib=100)
        return oracle.Truth(case, 0, trials)

    assert truth(_429=True, _455=False, _469=True).below_failures == 429
    assert truth(_1=False, _2=True).below_failures == 0
    assert truth(_1=True, _8=True).below_failures == 8


def test_nothing_fits() -> None:
    memory = Memory(lambda size: 2.0, 1.0)
    assert memory.search(100) == 0
    assert memory.tried[1] is False


def test_everything_fits() -> None:
    assert Memory(lambda size: 1.0, 2.0).search(100) == 100


# -- trials ----------------------------------------------------------------------------


@pytest.mark.slow
def test_trials_run_under_the_limit_and_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "truth.json"
    lines: list[str] = []
    case = Case(entry="wide", optimizer="sgd", xla=False, limit_mib=150)
    book = oracle.Book(Kept(file), lines.append)
    ran = book.trial(case, 8, 4)
    assert ran.ok, ran
    assert len(ran.peaks) == len(ran.rests) == 4
    assert ran.state_bytes < min(ran.peaks) <= max(ran.peaks) <= 150 * MIB
    exhausted = book.trial(case, 128, 4)
    assert exhausted.ended == "oom", exhausted
    assert len(lines) == 2
    again = oracle.Book(Kept(file), lines.append)
    assert again.trials(case) == [ran, exhausted]
    assert again.trial(case, 8, 2) == ran
    assert len(lines) == 2
    ((_, cases),) = json.loads(file.read_text()).items()
    assert list(cases) == [case.key]
