"""Keras in double precision, for as long as a comparison takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras

__all__ = ["precision", "use_precision"]


def use_precision(floatx: str) -> None:
    """Makes layers and data ``floatx``.

    Both have to be said: Keras keeps the policy that its first layer was made with.
    """
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)


@contextmanager
def precision(floatx: str) -> Iterator[None]:
    """``use_precision`` within, Keras's own default again behind."""
    use_precision(floatx)
    try:
        yield
    finally:
        use_precision("float32")
