"""The planned micro-batch against the largest that runs, the predicted peak against
the real one, for models of the zoo under limits.

    PYTHONPATH=tests python -m benchmarks.prediction --json [--models cnn,gru]
        [--limits 0,1,2] [--optimizers adam] [--xla no|yes|both] [--jobs 1]
        [--no-oracle] [--book build/bench/prediction_book.json]

Each case is trained for 20 steps and more by ``oomrun`` under its limit, with nothing
remembered, which gives the plan and the peaks; after all of them ``benchmarks.oracle``
searches for the largest micro-batch that runs 20 steps. All results are kept in the
book, by the sources they were measured with: a second call goes on, and a change to the
search for a plan leaves the oracle's results. Without ``--json`` the cases are printed
as a table. Takes hours for all models at three limits, most of them the oracle's.

How a case counts:

- ``largest``: what the oracle finds, or what ``oomrun`` itself trained with for all
  steps, if that is more. Where it trained with whole batches the oracle is not asked.
- ``ratio``: the size that was trained with in the end (the planned one, unless memory
  ran out) to ``largest``. None where not even one sample at a time runs, or where the
  oracle has not been asked yet (``largest`` is None).
- ``below_failures``: the largest that ran of the sizes below all that did not; above
  it chance decides.
- ``error``: of the predicted peak at the planned size, relative to the real one; None
  where nothing was predicted. Such a case counts against ``upper_held``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import oracle
from benchmarks.memory import managed
from benchmarks.memory.kept import PLANS, Kept, digest
from benchmarks.memory.managed import Managed
from benchmarks.zoo import ZOO
from benchmarks.zoo.outcome import Case

__all__ = ["Compared", "compare", "percentile", "summary", "worst_first"]

STEPS = oracle.STEPS
T = TypeVar("T")
_MIB = 2**20
_ABOVE_THE_PLAN = 1.1  # where the oracle begins: budgets are below limits


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One case: what was planned, and what there was."""

    case: str
    batch: int
    largest: int | None
    below_failures: int | None
    planned: int | None
    ratio: float | None
    probes: int
    probe_ooms: int
    training_ooms: int
    predicted_mib: float | None
    upper_mib: float | None
    real_mib: float | None
    error: float | None
    upper_held: bool
    exit_code: int
    seconds: float


def compare(
    case: Case, batch: int, run: Managed, truth: oracle.Truth | None
) -> Compared:
    """The row of a case.

    Args:
        case: what was trained.
        batch: its global batch.
        run: by ``oomrun``.
        truth: what the oracle found; None: it was not asked.
    """
    ended = _ended(run)
    largest = below = None
    if ended >= batch:
        largest = below = batch
    elif truth is not None:
        largest = max(truth.largest, ended)
        below = truth.below_failures
    error, upper_held = None, False
    if run.predicted is not None and run.real_peak:
        error = round(run.predicted / run.real_peak - 1, 4)
        upper_held = (run.predicted_high or 0) >= run.real_peak
    return Compared(
        case=case.key,
        batch=batch,
        largest=largest,
        below_failures=below,
        planned=run.planned,
        ratio=round(ended / largest, 3) if largest else None,
        probes=len(run.probed),
        probe_ooms=run.probe_ooms,
        training_ooms=run.training_ooms,
        predicted_mib=_mib(run.predicted),
        upper_mib=_mib(run.predicted_high),
        real_mib=_mib(run.real_peak),
        error=error,
        upper_held=upper_held,
        exit_code=run.exit_code,
        seconds=run.seconds,
    )


def _ended(run: Managed) -> int:
    """The micro-batch that a run trained all its steps with, at last; 0: it failed."""
    return run.trained if run.exit_code == 0 and run.steps >= STEPS else 0


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / _MIB, 1)


def percentile(values: Sequence[float], part: float) -> float:
    """The least of ``values`` that so large a part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def summary(rows: Sequence[Compared]) -> dict[str, Any]:
    """What is wanted of all cases together."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    errors = [abs(row.error) for row in rows if row.error is not None]
    return {
        "cases": len(rows),
        "ratios": len(ratios),
        "ratio_median": round(statistics.median(ratios), 3) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_below_0.8": sum(ratio < 0.8 for ratio in ratios),
        "probes_max": max((row.probes for row in rows), default=0),
        "probe_ooms": sum(row.probe_ooms for row in rows),
        "training_ooms": sum(row.training_ooms for row in rows),
        "error_median": round(statistics.median(errors), 4) if errors else None,
        "error_p95": percentile(errors, 0.95) if errors else None,
        "not_predicted": len(rows) - len(errors),
        "upper_held": sum(row.upper_held for row in rows),
        "failed": sum(row.exit_code != 0 for row in rows),
    }


def worst_first(rows: Iterable[Compared]) -> list[Compared]:
    """By exhaustions, then by ratio, then by error."""
    return sorted(
        rows,
        key=lambda row: (
            -(row.probe_ooms + row.training_ooms),
            1.0 if row.ratio is None else row.ratio,
            -abs(row.error or 0.0),
        ),
    )


class Cases:
    """Measures cases; what is in the book is not measured again.

    Args:
        file: the book.
    """

    def __init__(self, file: Path) -> None:
        self._kept = Kept(file)
        self._book = oracle.Book(self._kept, _log)
        self._section = f"plans {digest(PLANS)}"

    def plan(self, case: Case) -> Managed:
        """What comes of ``oomrun``."""
        known = self._kept.get(self._section, case.key)
        if known is not None:
            return Managed(**known)
        run = managed.run(case, STEPS)
        self._kept.put(self._section, case.key, dataclasses.asdict(run))
        _log(f"{case.key}: {compare(case, ZOO[case.entry].batch, run, None)}")
        return run

    def row(self, case: Case, *, ask: bool) -> Compared:
        """The row of a case.

        Args:
            case: what is trained.
            ask: the oracle, too.
        """
        run, batch, truth = self.plan(case), ZOO[case.entry].batch, None
        if _ended(run) < batch and (ask or self._book.settled(case) is not None):
            guess = int((run.trained or batch // 4) * _ABOVE_THE_PLAN)
            truth = oracle.largest(case, self._book, guess)
        return compare(case, batch, run, truth)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(rows: Sequence[Compared]) -> str:
    """The cases in Markdown."""
    names = [field.name for field in dataclasses.fields(Compared)]
    lines = [names, ["---"] * len(names)]
    lines += [[str(getattr(row, name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--limits", default="1,0,2", help="places in Entry.limits")
    parser.add_argument("--optimizers", default="adam")
    parser.add_argument("--xla", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--no-oracle", dest="oracle", action="store_false")
    parser.add_argument(
        "--book", type=Path, default=Path("build/bench/prediction_book.json")
    )
    given = parser.parse_args()
    cases = [
        Case(entry=name, optimizer=optimizer, xla=xla, limit_mib=ZOO[name].limits[at])
        for at, optimizer, xla, name in itertools.product(
            map(int, given.limits.split(",")),
            given.optimizers.split(","),
            {"no": (False,), "yes": (True,), "both": (False, True)}[given.xla],
            given.models.split(","),
        )
    ]
    measured = Cases(given.book)
    oracle.serve()

    def row(case: Case) -> Compared | str:
        return _attempt(lambda: measured.row(case, ask=given.oracle), case)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda case: _attempt(lambda: measured.plan(case), case), cases))
        found = list(pool.map(row, cases))
    rows = worst_first(row for row in found if isinstance(row, Compared))
    unmeasured = [row for row in found if isinstance(row, str)]
    if not given.json:
        print(table(rows))
        return
    print(
        json.dumps(
            {
                "benchmark": "prediction",
                "summary": summary(rows),
                "results": [dataclasses.asdict(row) for row in rows],
                "unmeasured": unmeasured,
            },
            indent=1,
        )
    )


def _attempt(measure: Callable[[], T], case: Case) -> T | str:
    """What is measured of a case, or why it could not be."""
    try:
        return measure()
    except Exception as error:  # hours of other cases must not be lost
        why = f"{case.key}: {type(error).__name__}: {error}"
        _log(why)
        return why


if __name__ == "__main__":
    main()
