"""What a strategy is, how a job's script is laid over devices, and which to take.

Strategies are found by name in the entry-point group ``oomrun.strategies``, so that
other packages can add theirs; the ones that come along are in ``oomrun_strategies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from oomrun.core import topology
from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.topology import Device, NvLink

__all__ = ["ENTRY_POINTS", "Choice", "Group", "Situation", "Strategy", "choose"]

#: The entry-point group; an entry's name is the word in the job file.
ENTRY_POINTS = "oomrun.strategies"


class Group(Protocol):
    """All the workers of an attempt, each with one replica, as one of them sees them.

    Every method waits for all of them, and all have to call the same ones in the same
    order. ``name`` says which call belongs to which.
    """

    rank: int
    size: int

    def sums(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Each tensor added up over all workers; also inside a graph."""

    def joined(self, tensor: Any, name: str) -> Any:
        """The rows of all workers' tensors, in the order of ranks; also in a graph."""

    def take_from_first(self, variables: Sequence[Any], name: str) -> None:
        """Gives variables the values that they have in the worker of rank 0."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that another worker has gone, not that we failed."""

    def leave(self) -> None:
        """Called before this worker ends in the middle, as all have agreed to."""


class Strategy(Protocol):
    """Made in the worker, without arguments, before the script runs."""

    def scope(self) -> AbstractContextManager[object]:
        """What the script runs inside of."""

    def group(self) -> Group | None:
        """The workers of the attempt; None where there is one worker only.

        Called once, when TensorFlow's devices are set up.
        """


# --- which one ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a strategy is chosen for.

    Attributes:
        devices: all that the job may train on, over all hosts.
        nvlinks: which of them NVLink joins.
        hosts: how many they are on.
        horovod: whether Horovod is installed.
        command: the program is not ours to lay over devices.
        own_limits: each CPU device has a memory limit.
    """

    devices: Sequence[Device]
    nvlinks: Sequence[NvLink] = ()
    hosts: int = 1
    horovod: bool = False
    command: bool = False
    own_limits: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are the CPU, once or several times."""
        return all(device.kind == "cpu" for device in self.devices)


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, and why, in one sentence."""

    strategy: str
    reason: str


def choose(asked: str, given: Situation) -> Choice:
    """The strategy to plan with.

    Args:
        asked: the job file's ``strategy``.
        given: what it is chosen for.

    Raises:
        InfeasiblePlanError: the strategy that the job file asks for cannot do it, or
            none can that may be taken without being asked for.
    """
    if asked != "auto":
        wrong, nearest = _cannot(asked, given)
        if wrong:
            raise InfeasiblePlanError(wrong, nearest=nearest)
        return Choice(asked, _asked_for(asked, given))
    return _auto(given)


def _cannot(asked: str, given: Situation) -> tuple[str, str]:
    """Why a strategy cannot be had, and what to write instead; empty where it can."""
    if given.command and asked != "single":
        wrong = (
            f"a command starts its own workers: strategy {asked} is for a script or a "
            "module"
        )
        return wrong, "strategy: single"
    if asked == "mirrored" and given.hosts > 1:
        wrong = f"strategy mirrored is for devices of one host, not of {given.hosts}"
        return wrong, f"strategy: {_in_workers(given)}"
    if asked == "mirrored" and not topology.fits_one_process(given.devices):
        wrong = "CUDA shows a process one MIG device only, and strategy mirrored is one"
        return wrong, f"strategy: {_in_workers(given)}"
    return "", ""


def _asked_for(asked: str, given: Situation) -> str:
    count = len(given.devices)
    what = {
        "single": "one device",
        "mirrored": f"{_devices(count)} in one process",
        "horovod": f"{_devices(count)}, one worker each",
        "multi_worker_mirrored": f"{_devices(count)}, one worker each",
    }[asked]
    return f"the job file asks for it: {what}"


def _auto(given: Situation) -> Choice:
    count = len(given.devices)
    if count == 1:
        only = given.devices[0].id
        return Choice("single", f"auto: there is one device to train on, {only}")
    if given.command:
        return Choice("single", "auto: a command starts its own workers")
    apart = _why_apart(given)
    if not apart:
        return Choice("mirrored", f"auto: {_devices(count)} {_joined(given)}")
    if given.horovod:
        return Choice("horovod", f"auto: {apart}")
    if given.hosts > 1:
        by = "Horovod is not installed, so TensorFlow adds up"
        return Choice("multi_worker_mirrored", f"auto: {apart} ({by})")
    raise InfeasiblePlanError(
        f"{apart}, but Horovod is not installed (tools/build_horovod.py of oomrun "
        "builds it), and TensorFlow's own servers take orders from whoever reaches "
        "this host",
        nearest="strategy: multi_worker_mirrored, where nobody else does",
    )


def _why_apart(given: Situation) -> str:
    """Why each device needs a worker of its own; empty where one can have all."""
    if given.hosts > 1:
        return f"the devices are on {given.hosts} hosts, so each has its own worker"
    if not topology.fits_one_process(given.devices):
        return "CUDA shows a process one MIG device only, so each has its own worker"
    # Without Horovod in one process: TensorFlow's servers would be open to the network.
    if given.on_cpu and given.own_limits and given.horovod:
        return (
            f"{_devices(len(given.devices))} with a limit each, which TensorFlow keeps "
            "to where each has its own worker"
        )
    return ""


def _in_workers(given: Situation) -> str:
    return "horovod" if given.horovod else "multi_worker_mirrored"


def _joined(given: Situation) -> str:
    if given.on_cpu:
        return "in one process"
    if _all_linked(given):
        return "of one host, joined by NVLink"
    return "of one host, in one process (not all joined by NVLink)"


def _all_linked(given: Situation) -> bool:
    linked = {frozenset((link.first, link.second)) for link in given.nvlinks}
    pairs = combinations((device.id for device in given.devices), 2)
    return all(frozenset(pair) in linked for pair in pairs)


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"
