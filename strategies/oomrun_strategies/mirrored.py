"""Several devices of one host in one worker, each with a copy of the model.

The copies are the worker's doing (docs/decisions/0025): TensorFlow's own
``MirroredStrategy`` neither gives devices unequal shares nor lets one of them take its
share in more passes than another, so the script does not run inside of it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

__all__ = ["MirroredStrategy"]


class MirroredStrategy:
    """Trains on all devices of the plan."""

    def scope(self) -> AbstractContextManager[None]:
        """What the script runs inside of: nothing; its model is an ordinary one."""
        return contextlib.nullcontext()

    def group(self) -> None:
        """There is no other worker."""
