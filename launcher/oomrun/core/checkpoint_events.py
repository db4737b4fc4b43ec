"""The events of checkpoints. See ``events``, by which they are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oomrun.core.event import Event

__all__ = ["CheckpointFailed", "CheckpointRejected", "CheckpointSaved", "Restored"]


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
