"""Values of options that the job file reads in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

__all__ = ["read"]

T = TypeVar("T")


def read(text: str, parse: Callable[[str], T], what: str) -> T:
    """``text`` as ``parse`` reads it.

    Args:
        text: the option's value.
        parse: raises ``ValueError``, with a hint or without one.
        what: what it should have been, with an example.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    try:
        return parse(text)
    except ValueError as error:
        hint = f": {error}" if str(error) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}{hint}") from None
