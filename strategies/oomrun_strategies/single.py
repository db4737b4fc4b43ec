"""One worker on one device: the script as it is, with no TensorFlow strategy."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

__all__ = ["SingleStrategy"]


class SingleStrategy:
    """Trains on one GPU, or on the CPU."""

    def scope(self) -> AbstractContextManager[None]:
        """What the script runs inside of: nothing, here."""
        return contextlib.nullcontext()

    def group(self) -> None:
        """There is no other worker."""
