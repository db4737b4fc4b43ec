"""What an entry of the zoo is: a network, its data, and the limits it is tried under.

Covers: building and compiling with any of the optimizers, with and without XLA; a
``fit`` over its data. Does not cover: the networks (``images``, ``sequences``,
``tables``) and watching their memory (``trial``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

__all__ = ["OPTIMIZERS", "Entry", "labels"]

#: They differ in the memory they keep: one slot, two, and factored ones with large
#: temporary values.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model, as a user would train it.

    Attributes:
        network: makes the network, without a loss or an optimizer.
        data: ``(x, y)`` of so many samples from a seed.
        loss: Keras's name of it.
        batch: the global batch size; more than the limits have room for.
        limits: of the device's memory, in MiB, rising.
        policy: Keras's dtype policy that the network is made under.
    """

    name: str
    network: Callable[[], Any] = field(repr=False)
    data: Callable[[int, int], tuple[Any, Any]] = field(repr=False)
    loss: str
    batch: int
    limits: tuple[int, int, int]
    policy: str = "float32"

    def build(self, optimizer: str = "adam", jit_compile: bool = False) -> Any:
        """The model, compiled; the same weights each time."""
        keras.utils.set_random_seed(0)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.policy)
        try:
            model = self.network()
            model.compile(OPTIMIZERS[optimizer](), self.loss, jit_compile=jit_compile)
        finally:
            keras.config.set_dtype_policy(before)
        return model

    def fit(self, model: Any, steps: int, callbacks: Sequence[Any] = ()) -> Any:
        """Trains for at least so many steps; what ``fit`` returns.

        An epoch has two batches only: on a CPU device with a limit, all data lie in
        the memory that is limited.
        """
        x, y = self.data(2 * self.batch, 0)
        return model.fit(
            x,
            y,
            batch_size=self.batch,
            epochs=-(-steps // 2),
            verbose=0,
            callbacks=list(callbacks),
        )

    @property
    def batch_bytes(self) -> int:
        """Of the data of one global batch."""
        few = self.batch // 64
        arrays = keras.tree.flatten(self.data(few, 0))
        return int(sum(value.nbytes for value in arrays)) // few * self.batch


def labels(rng: np.random.Generator, samples: int, classes: int = 10) -> Any:
    """Whole numbers below ``classes``, one a sample."""
    return rng.integers(0, classes, samples)
