"""What all events have, and the memory of a device that several of them tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["DeviceMemory", "Event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device, in bytes; None where it could not be read."""

    device: str
    in_use_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. ``at`` is in seconds since the epoch."""

    type: ClassVar[str] = ""
    at: float
