"""Runs that somebody watches: found, and followed through their journals.

Covers: which runs there are, what is known of each, whether it is being run. Does not
cover: how that looks (``overview.py``, ``frame.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from oomrun import journal
from oomrun.cli.frame import History
from oomrun.cli.status_command import find_run, not_a_run, supervisor_alive
from oomrun.core.errors import JournalError, PlatformError
from oomrun.core.state import JobState
from oomrun.rundir import RunDir

__all__ = ["Watched", "Watching"]

_EVENTS_KEPT = 200


class Watched:
    """One run.

    Attributes:
        state, history: as far as its journal was read.
        alive: whether a supervisor has it at this moment.
        trouble: why its journal cannot be read, or "".
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.state = JobState()
        self.history = History(events=_EVENTS_KEPT)
        self.alive = False
        self.trouble = ""
        self._follower = journal.Follower(run_dir.journal)

    @property
    def name(self) -> str:
        """Its folder's name, which runs of one job that were set aside differ by."""
        return self.run_dir.path.name

    @property
    def standing(self) -> str:
        """Its state in one word; ``interrupted`` where nobody runs it any more."""
        over = self.state.terminal or self.state.state == "pending"
        return self.state.state if over or self.alive else "interrupted"

    def look(self) -> None:
        """Reads what is new."""
        try:
            events, another = self._follower.news()
        except JournalError as error:
            self.trouble = str(error)
            return
        self.trouble = ""
        if another:
            self.state, self.history = JobState(), History(events=_EVENTS_KEPT)
        for event in events:
            self.state = self.state.after(event)
            self.history.add(self.state, event)
        self.alive = supervisor_alive(self.run_dir)


class Watching:
    """The named runs, or else all under ``runs/``, those that begin later too.

    Attributes:
        runs: by name, and then those that came later.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Finds the runs.

        Raises:
            PlatformError: one that is named is no run.
        """
        self._named = bool(names)
        self.runs: list[Watched] = []
        found = []
        for name in names:
            run_dir = find_run(Path(name))
            if run_dir is None:
                raise PlatformError(not_a_run(Path(name)))
            found.append(run_dir)
        self._take(found)

    def look(self) -> None:
        """Reads what is new of every run."""
        if not self._named:
            self._take(
                RunDir(path.parent) for path in Path("runs").glob("*/journal.jsonl")
            )
        for run in self.runs:
            run.look()

    def _take(self, found: Iterable[RunDir]) -> None:
        known = {run.run_dir for run in self.runs}
        new = sorted(set(found) - known, key=lambda run_dir: run_dir.path)
        # Not among the others: the one that was chosen must keep its place.
        self.runs += map(Watched, new)
