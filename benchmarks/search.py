"""From the start of a job to its first full step: planned by oomrun, and by hand.

    PYTHONPATH=tests python -m benchmarks.search --json [--models cnn,encoder]
        [--limits 1] [--optimizers adam]

The same job, a model of the zoo under a limit, each in a process of its own: run by
``oomrun`` with nothing remembered; or searched through by doubling from 2, by doubling
and then bisection (three steps a trial both), or by going down from the whole batch to
0.9 of it, or half, each time; then trained. The others have oomrun's engine for their
trials, all in one process, traced once (``benchmarks.memory.by_hand``).

Columns of seconds, each to the end of the first step over a whole global batch:

- ``seconds``: from the call of ``fit``, or the first trial: without the start of
  processes, imports, and making the model.
- ``with_start``: from the start of the command.
- ``without_waits``: ``seconds`` less ten for each exhaustion, as long as TensorFlow's
  allocator waits for memory before it says that there is none. It does so on GPUs, too,
  unless told not to, which makes steps fail that would have gone through; so what
  counts is ``seconds``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.memory import by_hand, managed
from benchmarks.zoo import ZOO
from benchmarks.zoo.outcome import Case
from benchmarks.zoo.trial import limited
from e2e import jobs

__all__ = ["Searched", "share_of_best", "summary"]

OOMRUN = "oomrun"
_WAIT_S = 10.0
_STEPS = 4
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One way to come to the first step of a job."""

    case: str
    way: str
    seconds: float
    with_start: float
    trials: int
    ooms: int
    micro_batch: int

    @property
    def without_waits(self) -> float:
        """Seconds without TensorFlow's waiting for memory that does not come."""
        return round(self.seconds - _WAIT_S * self.ooms, 2)


def by_oomrun(case: Case) -> Searched:
    """The job as ``oomrun`` runs it.

    Raises:
        RuntimeError: it did not come to its end.
    """
    run = managed.run(case, _STEPS)
    if run.first_step_s is None or run.start_s is None or run.exit_code:
        raise RuntimeError(f"{case.key} ended with exit code {run.exit_code}")
    return Searched(
        case=case.key,
        way=OOMRUN,
        seconds=run.first_step_s,
        with_start=round(run.start_s + run.first_step_s, 2),
        trials=len(run.probed),
        ooms=run.probe_ooms + run.training_ooms,
        micro_batch=run.trained,
    )


def by_hand_in_a_process(case: Case, way: str) -> Searched:
    """The job searched through in one of ``by_hand.WAYS``."""
    began = time.time()
    done = subprocess.run(
        [
            sys.executable, "-m", by_hand.__name__, case.entry, case.optimizer, way,
        ],
        env=jobs.environment(limited(case.limit_mib)),
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    start_s = found["began"] - began
    return Searched(
        case=case.key,
        way=way,
        seconds=found["first_step_s"],
        with_start=round(start_s + found["first_step_s"], 2),
        trials=found["trials"],
        ooms=found["ooms"],
        micro_batch=found["micro_batch"],
    )


def share_of_best(rows: Sequence[Searched], column: str) -> float:
    """oomrun's seconds as a part of the least of the others', for one case."""
    ours = [getattr(row, column) for row in rows if row.way == OOMRUN]
    others = [getattr(row, column) for row in rows if row.way != OOMRUN]
    return float(round(min(ours) / min(others), 3))


def summary(rows: Sequence[Searched]) -> dict[str, Any]:
    """The shares by case, and their medians."""
    cases: dict[str, list[Searched]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    found: dict[str, Any] = {"ooms": sum(r.ooms for r in rows if r.way == OOMRUN)}
    for column in ("seconds", "with_start", "without_waits"):
        shares = {case: share_of_best(each, column) for case, each in cases.items()}
        median = round(statistics.median(shares.values()), 3)
        found[column] = {"share_median": median, "shares": shares}
    return found


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default="cnn,encoder")
    parser.add_argument("--limits", default="1", help="places in Entry.limits")
    parser.add_argument("--optimizers", default="adam")
    given = parser.parse_args()
    rows = []
    for name, at, optimizer in itertools.product(
        given.models.split(","),
        map(int, given.limits.split(",")),
        given.optimizers.split(","),
    ):
        limit_mib = ZOO[name].limits[at]
        case = Case(entry=name, optimizer=optimizer, xla=False, limit_mib=limit_mib)
        for way in (OOMRUN, *by_hand.WAYS):
            row = by_oomrun(case) if way == OOMRUN else by_hand_in_a_process(case, way)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    results = [
        {**dataclasses.asdict(row), "without_waits": row.without_waits} for row in rows
    ]
    found = {"benchmark": "search", "summary": summary(rows), "results": results}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for result in results:
        print("| " + " | ".join(map(str, result.values())) + " |")


if __name__ == "__main__":
    main()
