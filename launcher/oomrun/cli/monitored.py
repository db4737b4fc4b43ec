"""The runs of a machine as one endpoint shows them: those that run, and just ended.

Covers: which of the known runs are shown, and under which names. Does not cover:
finding them (``oomrun.known_runs``), following one (``watching.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from oomrun import known_runs
from oomrun.cli.watching import Watched
from oomrun.core.state import JobState
from oomrun.rundir import RunDir

__all__ = ["Monitored"]

_log = logging.getLogger(__name__)


class Monitored:
    """The runs that the folders list.

    Args:
        folders: as of ``known_runs.folders_of``.
        keep_s: how long a run is shown after its end.
        all_users: whether other users' runs are shown.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        keep_s: float,
        all_users: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folders, self._all_users = folders, all_users
        self._keep_s, self._clock = keep_s, clock
        self._watched: dict[RunDir, Watched] = {}
        self._complained: set[str] = set()
        self._names: dict[str, str] = {}
        self._one_at_a_time = threading.Lock()

    def states(self) -> list[JobState]:
        """The states of the runs that are shown, at this moment."""
        with self._one_at_a_time:
            found = known_runs.find(self._folders, all_users=self._all_users)
            self._watched = {
                run_dir: self._watched.get(run_dir) or Watched(run_dir)
                for run_dir in found
            }
            return [
                self._named(watched.state)
                for watched in self._watched.values()
                if self._shows(watched)
            ]

    def _shows(self, watched: Watched) -> bool:
        """Not what nobody runs: a run's own endpoint is gone then, too."""
        watched.look()
        if watched.trouble:
            if watched.trouble not in self._complained:
                self._complained.add(watched.trouble)
                _log.warning("a run is left out: %s", watched.trouble)
            return False
        state = watched.state
        if state.terminal and state.ended_at is not None:
            return watched.alive or self._clock() - state.ended_at <= self._keep_s
        return watched.alive

    def _named(self, state: JobState) -> JobState:
        """Two runs of one name would be one series; the second to come is told apart.

        A run keeps its name for as long as we run, whatever becomes of the other.
        """
        if state.run_id not in self._names:
            taken = state.name in self._names.values()
            own = f"{state.name}-{state.run_id[:6]}" if taken else state.name
            self._names[state.run_id] = own
        return replace(state, name=self._names[state.run_id])
