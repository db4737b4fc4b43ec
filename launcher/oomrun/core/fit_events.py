"""The events of a ``fit`` as a whole; see ``events.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oomrun.core.event import Event

__all__ = ["FitEnded", "FitStarted", "OptimizerReplaced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStarted(Event):
    """The script's ``fit``-th call of ``fit`` (from 1) began, or goes on.

    ``profile_key`` says which trainings need memory alike (``profile.full_key``); None
    where that cannot be said. ``custom_loop``: it is one of ``oomrun.Loop``.
    """

    type: ClassVar[str] = "fit_started"
    attempt: int
    fit: int
    epochs: int
    initial_epoch: int
    global_batch_size: int | None
    micro_batch_size: int | None
    steps_per_epoch: int | None
    state_bytes: int | None = None
    profile_key: str | None = None
    custom_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReplaced(Event):
    """A lever has given a model another optimizer than the script did.

    ``written_bytes`` are what the slots of the script's own would take for this model,
    ``used_bytes`` those that the one in its place takes.
    """

    type: ClassVar[str] = "optimizer_replaced"
    attempt: int
    fit: int
    lever: str
    model: str
    written: str
    used: str
    written_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEnded(Event):
    """The ``fit``-th call of ``fit`` returned (``replayed``: from its record)."""

    type: ClassVar[str] = "fit_ended"
    attempt: int
    fit: int
    step: int
    samples: int
    epoch: int
    replayed: bool = False
