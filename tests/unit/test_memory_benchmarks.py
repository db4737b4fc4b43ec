"""What the benchmarks of memory make of what they measured."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import prediction, search
from benchmarks.memory import by_hand, managed
from benchmarks.memory.kept import PLANS, TRUTH, Kept, digest
from benchmarks.memory.managed import Managed
from benchmarks.oracle import Truth
from benchmarks.zoo.outcome import Case
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import events as ev

MIB = 2**20
CASE = Case(entry="cnn", optimizer="adam", xla=False, limit_mib=125)
RAN = Managed(
    planned=80, trained=80, steps=20, probed=((70, MIB),), predicted=95 * MIB,
    predicted_high=102 * MIB, real_peak=100 * MIB,
)  # fmt: skip


def row(largest: int | None = 100, **changed: object) -> prediction.Compared:
    run = dataclasses.replace(RAN, **changed)  # type: ignore[arg-type]
    truth = None if largest is None else Truth(CASE, largest, ())
    return prediction.compare(CASE, 512, run, truth)


# -- the oracle ------------------------------------------------------------------------

# A script without a guard: each of its processes asks again, and dies of it.
UNGUARDED = """
from benchmarks.oracle import in_a_process
from benchmarks.zoo.outcome import Case

case = Case(entry="dense", optimizer="adam", xla=False, limit_mib=60)
print(in_a_process(case, 8, 1))
"""


def test_a_trial_whose_process_dies_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(UNGUARDED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    asked = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 1
    assert "TrialError: dense/adam/plain/60 at micro-batch 8" in asked.stderr
    assert "Outcome" not in asked.stdout


# -- prediction ------------------------------------------------------------------------


def test_a_plan_is_compared_with_the_largest_that_runs() -> None:
    found = row(100)
    assert (found.planned, found.largest, found.ratio) == (80, 100, 0.8)
    assert found.error == pytest.approx(-0.05)
    assert found.upper_held


def test_what_trained_does_run_whatever_the_oracle_says() -> None:
    assert row(70).largest == 80
    assert row(70).ratio == 1.0


def test_a_plan_that_ran_out_of_memory_counts_as_what_was_trained_in_the_end() -> None:
    found = row(100, planned=120, trained=60, training_ooms=1)
    assert (found.planned, found.ratio, found.training_ooms) == (120, 0.6, 1)


@pytest.mark.parametrize("failed", [{"exit_code": 3}, {"steps": 19}])
def test_a_run_that_failed_has_trained_nothing(failed: dict[str, int]) -> None:
    assert row(100, **failed).ratio == 0.0


def test_where_nothing_runs_or_nothing_is_known_there_is_no_ratio() -> None:
    assert row(0, exit_code=3, trained=0, steps=0).ratio is None
    unknown = row(None)
    assert (unknown.largest, unknown.ratio) == (None, None)


def test_whole_batches_need_no_oracle() -> None:
    found = row(None, planned=512, trained=512)
    assert (found.largest, found.ratio) == (512, 1.0)
    assert row(None, planned=512, trained=512, exit_code=1).largest is None


def test_what_was_not_predicted_counts_against_the_upper_end() -> None:
    rows = [row(), row(planned=None, predicted=None, predicted_high=None)]
    assert rows[1].error is None
    summed = prediction.summary(rows)
    assert (summed["not_predicted"], summed["upper_held"]) == (1, 1)


def test_the_summary_is_over_all_cases() -> None:
    rows = [
        row(100),
        row(160, probed=((8, 1), (99, None), (70, 1)), real_peak=110 * MIB),
        row(80, training_ooms=2, predicted=100 * MIB),
    ]
    summed = prediction.summary(rows)
    assert summed["ratio_median"] == 0.8
    assert summed["ratio_min"] == 0.5
    assert summed["ratio_below_0.8"] == 1
    assert summed["probes_max"] == 3
    assert (summed["probe_ooms"], summed["training_ooms"]) == (1, 2)
    assert summed["error_median"] == pytest.approx(0.05)
    assert summed["error_p95"] == pytest.approx(1 - 95 / 110, abs=1e-4)
    assert (summed["cases"], summed["upper_held"]) == (3, 2)
    assert prediction.summary([])["cases"] == 0


def test_worst_first() -> None:
    bad, worse, fine = row(160), row(100, training_ooms=1), row(80)
    assert prediction.worst_first([fine, bad, worse]) == [worse, bad, fine]


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_a_percentile_leaves_no_more_above_it(values: list[float], part: float) -> None:
    found = prediction.percentile(values, part)
    assert found in values
    below = sum(value <= found for value in values) / len(values)
    assert below >= part - 1e-9
    assert sum(value < found for value in values) / len(values) < part


# -- a run's journal -------------------------------------------------------------------


def test_a_journal_tells_the_plan_and_the_peak_at_it() -> None:
    def progressed(step: int, micro: int, peak: int) -> ev.Progressed:
        memory = ev.DeviceMemory(
            device="cpu:0", in_use_bytes=1, peak_bytes=peak, limit_bytes=None
        )
        return ev.Progressed(
            at=0.0, attempt=1, fit=1, step=step, samples=0, epoch=1, step_in_epoch=1,
            loss=None, window_steps=1, step_s=1.0, global_batch_size=512,
            micro_batch_size=micro, memory=(memory,),
        )  # fmt: skip

    def probed(size: int, peak: int | None) -> ev.Probed:
        return ev.Probed(
            at=0.0, attempt=1, fit=1, micro_batch_size=size, steps=3, peak_bytes=peak,
            seconds=1.0,
        )  # fmt: skip

    planned = ev.MicroBatchPlanned(
        at=0.0, attempt=1, fit=1, micro_batch_size=80, global_batch_size=512,
        reason="", predicted_peak_bytes=90, predicted_peak_high_bytes=99,
    )  # fmt: skip
    found = managed.read(
        [
            probed(40, 50), probed(90, None), planned, progressed(3, 80, 91),
            progressed(9, 80, 95), progressed(20, 40, 200),
        ]
    )  # fmt: skip
    assert found == Managed(
        planned=80, trained=40, steps=20, probed=((40, 50), (90, None)), predicted=90,
        predicted_high=99, real_peak=95,
    )  # fmt: skip
    assert managed.read([]) == Managed()


# -- what is kept ----------------------------------------------------------------------


def test_results_are_kept_by_section(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "book.json"
    Kept(file).put("old", "case", 1)
    Kept(file).put("new", "case", 2)
    again = Kept(file)
    assert (again.get("old", "case"), again.get("new", "case")) == (1, 2)
    assert again.get("new", "other") is None
    assert json.loads(file.read_text()) == {"old": {"case": 1}, "new": {"case": 2}}


def test_a_changed_byte_or_name_is_another_digest(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    source = tmp_path / "engine" / "step.py"
    source.write_text("a = 1\n")
    digests = [digest([tmp_path / "engine"])]
    source.write_text("a = 2\n")
    digests.append(digest([tmp_path / "engine"]))
    source.rename(tmp_path / "engine" / "steps.py")
    digests.append(digest([tmp_path / "engine"]))
    assert len(set(digests)) == 3
    assert digest([tmp_path / "engine"]) == digests[-1]


def test_all_sources_that_results_belong_to_are_there() -> None:
    assert all(source.exists() for source in PLANS)
    assert set(TRUTH) < set(PLANS)


# -- search ----------------------------------------------------------------------------


@given(most=st.integers(1, 2000), fits=st.integers(0, 3000))
def test_each_way_finds_what_it_should(most: int, fits: int) -> None:
    boundary = min(most, fits)
    for way, look in by_hand.WAYS.items():
        tried: dict[int, bool] = {}

        def attempt(size: int, steps: int, tried: dict[int, bool] = tried) -> bool:
            assert 1 <= size <= most
            assert size not in tried, "tried twice"
            tried[size] = size <= fits
            return tried[size]

        found = look(most, attempt)
        assert found <= boundary
        if way == "doubling, bisection":
            assert found == boundary
        if boundary >= 2:
            assert tried[found]
            assert found > {"0.9x": 0.9 * boundary - 1}.get(way, boundary // 2 - 1)


def searched(
    way: str, seconds: float, ooms: int = 0, case: str = "a"
) -> search.Searched:
    return search.Searched(
        case=case, way=way, seconds=seconds, with_start=seconds + 5, trials=1,
        ooms=ooms, micro_batch=8,
    )  # fmt: skip


def test_the_share_is_of_the_best_of_the_others() -> None:
    rows = [
        searched("oomrun", 4.0), searched("doubling", 40.0, ooms=3),
        searched("halving", 20.0, ooms=1),
        searched("oomrun", 6.0, ooms=1, case="b"), searched("halving", 10.0, case="b"),
    ]  # fmt: skip
    found = search.summary(rows)
    assert found["ooms"] == 1
    assert found["seconds"]["shares"] == {"a": 0.2, "b": 0.6}
    assert found["seconds"]["share_median"] == 0.4
    assert found["with_start"]["shares"] == {"a": 0.36, "b": 0.733}
    assert found["without_waits"]["shares"]["a"] == 0.4
