"""What is tried and what came of it. TensorFlow is not needed to read it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Case", "Outcome"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a trial is of: an entry of the zoo, and how and where it is trained."""

    entry: str
    optimizer: str
    xla: bool
    limit_mib: int

    @property
    def key(self) -> str:
        """One word for it."""
        xla = "xla" if self.xla else "plain"
        return f"{self.entry}/{self.optimizer}/{xla}/{self.limit_mib}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial.

    Attributes:
        wanted: steps that it was to take.
        ended: ran, oom or hung.
        state_bytes: of the weights, the optimizer's and the metrics' variables.
        batch_bytes: of one global batch.
        rests: bytes in use as each step begins: the state, and data that were read.
        peaks: the allocator's peak within each step.
        seconds: of each step.
        seconds_all: of the whole trial, with the model made and the steps traced.
        message: of what ended it, empty for ran.
    """

    micro: int
    wanted: int
    ended: str
    state_bytes: int = 0
    batch_bytes: int = 0
    rests: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    seconds_all: float = 0.0
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether all of its steps ran."""
        return self.ended == "ran"
