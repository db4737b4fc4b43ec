"""Every metric there is, and the collector that computes them when they are scraped.

Covers: joining the families, ``JobStateCollector``. Does not cover: serving them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import oomrun
from oomrun.core.machine import MachineReading
from oomrun.core.state import JobState
from oomrun.metrics.device_families import DEVICE_FAMILIES
from oomrun.metrics.family import Kept, build, build_machine
from oomrun.metrics.machine_families import MACHINE_FAMILIES
from oomrun.metrics.run_families import RUN_FAMILIES

__all__ = [
    "FAMILIES", "MACHINE_FAMILIES", "JobStateCollector", "collect", "registry_of",
]  # fmt: skip

#: Of runs; every sample has the label ``run``.
FAMILIES = (*RUN_FAMILIES, *DEVICE_FAMILIES)


#: More runs than any machine has; then all is read anew.
_MOST_KEPT = 20_000


def collect(states: Sequence[JobState], kept: Kept | None = None) -> Iterator[Metric]:
    """All metrics of all ``states``; those whose run has not begun are left out.

    Args:
        states: the runs.
        kept: what need not be read again, from the last call; it is changed.
    """
    begun = [state for state in states if state.name]
    known = {} if kept is None else kept
    for family in FAMILIES:
        yield build(family, begun, known)


class JobStateCollector(Collector):
    """Computes every metric at the moment of a scrape.

    Args:
        current_states: the runs.
        machine: what the machine itself tells, None where nobody has asked it.
    """

    def __init__(
        self,
        current_states: Callable[[], Sequence[JobState]],
        machine: Callable[[], MachineReading | None] = lambda: None,
    ) -> None:
        self._current_states = current_states
        self._machine = machine
        self._kept: Kept = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask for a state."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The build's own metric, then those of the runs, then the machine's."""
        info = {"version": oomrun.__version__, "python": platform.python_version()}
        yield InfoMetricFamily(
            "oomrun_build", "The oomrun that runs the job.", value=info
        )
        if len(self._kept) > _MOST_KEPT:
            self._kept = {}
        yield from collect(self._current_states(), self._kept)
        reading = self._machine()
        if reading is not None:
            yield from (build_machine(family, reading) for family in MACHINE_FAMILIES)


def registry_of(
    current_states: Callable[[], Sequence[JobState]],
    machine: Callable[[], MachineReading | None] = lambda: None,
) -> CollectorRegistry:
    """A registry with the metrics of these runs and of this machine."""
    registry = CollectorRegistry()
    registry.register(JobStateCollector(current_states, machine))
    return registry
