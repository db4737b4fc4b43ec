"""The events of checkpoints. See ``events``, by which they are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oomrun.core.event import Event

__all__ = [
    "CheckpointFailed", "CheckpointMirrored", "CheckpointRejected", "CheckpointSaved",
    "CheckpointsFetched", "MirrorFailed", "Restored",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk; ``name`` is its folder."""

    type: ClassVar[str] = "checkpoint_saved"
    attempt: int
    name: str
    step: int
    samples: int
    epoch: int
    size_bytes: int
    duration_s: float
    blocked_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training goes on with the last good one."""

    type: ClassVar[str] = "checkpoint_failed"
    attempt: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected(Event):
    """A checkpoint on disk was torn or altered and is not used."""

    type: ClassVar[str] = "checkpoint_rejected"
    attempt: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """Training goes on from a checkpoint (or from the start: ``name`` is empty)."""

    type: ClassVar[str] = "restored"
    attempt: int
    name: str
    fit: int
    step: int
    samples: int
    lost_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMirrored(Event):
    """A checkpoint is complete at the URL that the job file names, too."""

    type: ClassVar[str] = "checkpoint_mirrored"
    attempt: int
    name: str
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorFailed(Event):
    """A checkpoint could not be copied there (no ``name``: what is there not read)."""

    type: ClassVar[str] = "mirror_failed"
    attempt: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsFetched(Event):
    """A run goes on here with what it has left at a URL.

    ``levers`` are those that were in force there; of ``rejected`` checkpoints, which
    were torn or altered, none is used.
    """

    type: ClassVar[str] = "checkpoints_fetched"
    url: str
    names: tuple[str, ...]
    size_bytes: int
    duration_s: float
    levers: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
