"""The largest micro-batch that really runs, found by trying.

    PYTHONPATH=tests python -m benchmarks.oracle --file truth.json [--models cnn,gru]
        [--optimizers adam] [--xla no|yes|both] [--limits 1,0,2]

Each trial takes twenty steps of ``fit`` over the entry's global batch, cut by oomrun's
engine, in a process of its own under the allocator's limit. What has been tried is
kept in the file, and not tried again with the same engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.memory.kept import TRUTH, Kept, digest
from benchmarks.zoo import ZOO
from benchmarks.zoo.outcome import Case, Outcome

__all__ = ["Book", "TrialError", "Truth", "largest", "serve"]

STEPS = 20
_FEW_STEPS = 4  # most sizes that do not fit do not get so far
_SURVEY_STEPS = 8  # enough to see the peak of a size that is far from the boundary
_GRID = 1.03
_STRIDE = 4  # places from the guess to the next size, then twice as many
_ABOVE = 4  # sizes above the largest that are tried, since memory is not monotone
_BELOW = (0.125, 0.25, 0.5, 0.75)
_RESTART = 70  # the exit code of a worker that cannot go on
_PATIENCE_S = 400

Try = Callable[[int, int], Outcome]


class TrialError(RuntimeError):
    """A trial failed for another reason than memory: it says nothing."""


@dataclass(frozen=True)
class Truth:
    """What was found.

    Attributes:
        largest: the largest micro-batch that took all steps; 0: none did.
        trials: all that was tried, by micro-batch.
    """

    case: Case
    largest: int
    trials: tuple[Outcome, ...]

    @property
    def below_failures(self) -> int:
        """The largest that ran of those below all that did not.

        Near the boundary it is chance whether memory runs out within so many steps.
        """
        failed = min((t.micro for t in self.trials if not t.ok), default=sys.maxsize)
        return max(
            (t.micro for t in self.trials if t.ok and t.micro < failed), default=0
        )


class Book:
    """All trials so far with the engine as it is.

    Args:
        kept: where they are.
        log: told of each trial, a line.
    """

    def __init__(
        self, kept: Kept | None = None, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self._kept, self._log = kept or Kept(), log
        self._section = f"truth {digest(TRUTH)}"

    def _found(self, case: Case) -> dict[str, Any]:
        found = self._kept.get(self._section, case.key)
        return found or {"largest": None, "trials": []}

    def trials(self, case: Case) -> list[Outcome]:
        """What was tried of a case, by micro-batch."""
        found = [_outcome(row) for row in self._found(case)["trials"]]
        return sorted(found, key=lambda outcome: outcome.micro)

    def trial(self, case: Case, micro: int, steps: int) -> Outcome:
        """What comes of a trial, from the book if it was made before."""
        others = [known for known in self.trials(case) if known.micro != micro]
        for known in self.trials(case):
            if known.micro == micro and (known.wanted >= steps or not known.ok):
                return known
        outcome = in_a_process(case, micro, steps)
        rows = [dataclasses.asdict(each) for each in (*others, outcome)]
        self._kept.put(self._section, case.key, {**self._found(case), "trials": rows})
        peak = max(outcome.peaks, default=0) / 2**20
        self._log(
            f"{case.key} micro {micro}: {outcome.ended} after {len(outcome.peaks)} "
            f"steps, peak {peak:.0f} MiB, {outcome.seconds_all} s"
        )
        return outcome

    def settled(self, case: Case) -> int | None:
        """The result of a search that came to its end."""
        largest: int | None = self._found(case)["largest"]
        return largest

    def settle(self, case: Case, largest: int) -> None:
        """Notes the result of a search."""
        self._kept.put(
            self._section, case.key, {**self._found(case), "largest": largest}
        )


def _outcome(row: dict[str, Any]) -> Outcome:
    lists = {name: tuple(v) for name, v in row.items() if isinstance(v, list)}
    return Outcome(**{**row, **lists})


def largest(case: Case, book: Book | None = None, guess: int | None = None) -> Truth:
    """Searches for the largest micro-batch that runs; takes minutes.

    Args:
        case: of the zoo, and a limit.
        book: where trials are kept.
        guess: where to begin.
    """
    book = book or Book()
    found = book.settled(case)
    if found is None:
        found = search(
            ZOO[case.entry].batch,
            case.limit_mib * 2**20,
            lambda micro, steps: book.trial(case, micro, steps),
            guess,
        )
        book.settle(case, found)
    return Truth(case, found, tuple(book.trials(case)))


def search(batch: int, limit_bytes: int, attempt: Try, guess: int | None = None) -> int:
    """The largest size that takes all steps, with sizes around it tried as well.

    Args:
        batch: the largest size that makes sense.
        limit_bytes: of the device, for a first guess.
        attempt: tries a size for so many steps.
        guess: where to begin. Without one, sizes far below are tried first, to guess
            by, and at last, for those who study peaks.

    Returns:
        The size, 0 if none runs.
    """
    grid = _grid(batch)
    tried: dict[int, bool] = {}

    def fits(place: int) -> bool:
        size = grid[place]
        if size not in tried:
            tried[size] = attempt(size, _FEW_STEPS).ok
        return tried[size]

    begin = guess or _guess(batch, limit_bytes, attempt)
    start = min(range(len(grid)), key=lambda place: abs(grid[place] - begin))
    place = _boundary(len(grid), start, fits)
    misses = 0
    while place + 1 < len(grid) and misses < _ABOVE:
        place += 1
        misses = 0 if fits(place) else misses + 1
    found = _lasting(grid, tried, attempt)
    for part in _BELOW if guess is None else ():
        if int(part * found):
            attempt(int(part * found), _SURVEY_STEPS)
    return found


def _lasting(grid: Sequence[int], tried: Mapping[int, bool], attempt: Try) -> int:
    """The largest size that takes all steps, of those that may."""
    most = max((size for size, ran in tried.items() if ran), default=0)
    sizes = [size for size in grid if size <= most and tried.get(size, True)]
    return next((size for size in reversed(sizes) if attempt(size, STEPS).ok), 0)


def _boundary(places: int, start: int, fits: Callable[[int], bool]) -> int:
    """A place that fits before one that does not, -1 before the first place."""
    low, high, stride = -1, places, _STRIDE
    place = start
    while low < place < high:
        if fits(place):
            low, place = place, place + stride
        else:
            high, place = place, place - stride
        stride *= 2
        if low >= 0 and high < places:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _guess(batch: int, limit_bytes: int, attempt: Try) -> int:
    """Where the boundary may be, by the peaks of two sizes far apart."""
    small, large = max(1, batch // 8), max(2, batch // 3)
    first, second = (attempt(size, _SURVEY_STEPS) for size in (small, large))
    if not (first.ok and second.ok):
        return int(small * 1.5) if first.ok else small // 2
    peak = max(second.peaks)
    rise = (peak - max(first.peaks)) / (large - small)
    return int(large + (limit_bytes - peak) / rise) if rise > 0 else 2 * large


def _grid(batch: int) -> list[int]:
    """Sizes up to ``batch``, each about 3 % above the one before."""
    sizes = {batch}
    size = float(batch)
    while size > 1:
        size /= _GRID
        sizes.add(max(1, round(size)))
    return sorted(sizes)


def in_a_process(case: Case, micro: int, steps: int) -> Outcome:
    """A trial in a process of its own, forked from one that has TensorFlow imported."""
    context = multiprocessing.get_context("forkserver")
    serve()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, case, micro, steps))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE_S):
            process.kill()
            return Outcome(micro=micro, wanted=steps, ended="hung")
        answer = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        if code != _RESTART:
            raise TrialError(
                f"{case.key} at micro-batch {micro}: its process ended with {code}"
            ) from None
        return Outcome(micro=micro, wanted=steps, ended="oom", message=f"exit {code}")
    finally:
        process.join()
        ours.close()
    if isinstance(answer, str):
        raise TrialError(f"{case.key} at micro-batch {micro}: {answer}")
    return answer  # type: ignore[no-any-return]


@functools.cache
def serve() -> None:
    """Starts the process that the trials are forked from, once.

    Our environment is another one meanwhile: call it before there are threads.
    """
    multiprocessing.set_forkserver_preload([f"{__package__}.zoo.trial"])
    before = dict(os.environ)
    # What TensorFlow reads when it is imported; the limit it reads at its first use.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _child(answer: Connection, case: Case, micro: int, steps: int) -> None:
    from benchmarks.zoo import trial

    try:
        answer.send(trial.run(case, micro, steps))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
    answer.close()
    # XLA's allocator aborts a process that ends the usual way after an exhaustion.
    os._exit(0)


def main() -> None:
    """Searches, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--models", help="names, separated by commas; default: all")
    parser.add_argument("--optimizers", default="adam")
    parser.add_argument("--xla", choices=("no", "yes", "both"), default="no")
    parser.add_argument("--limits", default="1,0,2", help="places in Entry.limits")
    given = parser.parse_args()
    book = Book(Kept(given.file), lambda line: print(line, file=sys.stderr, flush=True))
    found = []
    for limit, optimizer, xla, name in itertools.product(
        map(int, given.limits.split(",")),
        given.optimizers.split(","),
        {"no": (False,), "yes": (True,), "both": (False, True)}[given.xla],
        given.models.split(",") if given.models else ZOO,
    ):
        case = Case(
            entry=name,
            optimizer=optimizer,
            xla=xla,
            limit_mib=ZOO[name].limits[limit],
        )
        try:
            truth = largest(case, book)
        except TrialError as error:
            print(error, file=sys.stderr, flush=True)
            continue
        found.append(
            {
                "case": truth.case.key,
                "largest": truth.largest,
                "below_failures": truth.below_failures,
                "trials": len(truth.trials),
            }
        )
    print(json.dumps({"benchmark": "oracle", "results": found}, indent=1))


if __name__ == "__main__":
    main()
