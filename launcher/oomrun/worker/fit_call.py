"""One call of ``fit`` in a script, and how far it has got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oomrun.worker.encoding import Arrays
from oomrun.worker.validation import Validation

__all__ = ["FitCall"]


@dataclass
class FitCall:
    """One call of ``fit``.

    Attributes:
        number: from 1, in the order of the script.
        fingerprint: what must be alike for a checkpoint to belong to this call.
        saved: state and arrays to go on from, None for a fresh start.
        pending: the same, waiting for the first batch, since shapes alone did not tell
            which variables the model has.
        epoch, batches: epochs done, and batches done in the current one.
        entered: the batch at which the current epoch was entered, None if at its first.
        validation: what it will validate with, where that stays on the device.
        places: what keeps the places of its batches apart; None while there are none.
        loop: where it is a custom loop, gives what is to be saved of the loop itself.
        key: says what is trained, by a batch, see ``model_key``; None where it cannot.
    """

    number: int
    fingerprint: dict[str, Any]
    model: Any
    epochs: int = 1
    initial_epoch: int = 0
    saved: tuple[dict[str, Any], Arrays] | None = None
    pending: tuple[dict[str, Any], Arrays] | None = None
    iterator: Any = None
    validation: Validation | None = None
    places: list[Any] | None = None
    callbacks: list[Any] = field(default_factory=list)
    epoch: int = 0
    batches: int = 0
    entered: int | None = None
    announced: bool = False
    managed: bool = True
    loop: Callable[[], dict[str, Any]] | None = None
    key: Callable[[Any], str | None] | None = None

    @property
    def waits_for_data(self) -> bool:
        """Whether no batch comes to lie on the device while a step runs."""
        return bool(getattr(self.iterator, "waits_for_data", False))

    @property
    def steps_to_come(self) -> int | None:
        """Optimizer steps until its end; None where an epoch's length is not known."""
        length: int | None = getattr(self.iterator, "num_batches", None)
        if not length:
            return None
        return max(0, (self.epochs - self.epoch) * length - self.batches)
