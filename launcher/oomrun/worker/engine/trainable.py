"""What of a model was trainable when its step was first traced.

Plain Keras traces a step once: a callback that freezes a layer without compiling the
model again changes nothing. Here a step is traced again when its batches are first cut,
and must train the same weights then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["Flags"]


class Flags:
    """The ``trainable`` of each layer and weight of a model, as it is now."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Parents come before what they hold: setting theirs sets that of all below.
        layers = [*model._flatten_layers()]
        self._flags = [(layer, layer.trainable) for layer in layers]
        self._flags += [(weight, weight.trainable) for weight in model.weights]

    def put(self) -> None:
        """Sets them again where they have changed."""
        for owner, flag in self._flags:
            if owner.trainable != flag:
                owner.trainable = flag

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Has the model trainable as it was, while the block traces."""
        now = Flags(self._model)
        self.put()
        try:
            yield
        finally:
            now.put()
