"""Kubernetes quantities: what they say, and amounts written as such.

Covers: ``4``, ``500m``, ``32Gi``, ``1e9``. Does not cover: sizes as a job file writes
them (``core.units``).
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["binary", "cores", "parse"]

_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30),
    "Ti": Fraction(2**40), "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
_quantity = re.compile(
    r"([+-]?(?:[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20}))"
    r"(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]{0,2}))",
    re.ASCII,
)


def parse(text: str) -> Fraction:
    """The number that a quantity stands for.

    Raises:
        ValueError: it is none; the text is a hint, and may be empty.
    """
    match = _quantity.fullmatch(text)
    if match is None or match[3] not in (None, *_SUFFIXES):
        raise ValueError(_slip(text))
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Fraction(number) * Fraction(10) ** int(exponent)
    return Fraction(number) * _SUFFIXES[suffix]


def _slip(text: str) -> str:
    """What was probably meant, as a hint, or ""."""
    match = re.fullmatch(r"([0-9.]+)([kKmMgGtT])([iI]?)[bB]?", text, re.ASCII)
    if match is None:
        return ""
    binary = "i" if match[3] else ""
    letter = match[2].upper() if binary or match[2] not in "kK" else "k"
    return f"did you mean {match[1]}{letter}{binary}?"


def binary(count: int) -> str:
    """Bytes as the shortest exact quantity, such as 32Gi."""
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        factor = int(_SUFFIXES[suffix])
        if count and count % factor == 0:
            return f"{count // factor}{suffix}"
    return str(count)


def cores(millicores: int) -> str:
    """Cores as a quantity, such as 4 or 500m."""
    whole, rest = divmod(millicores, 1000)
    return f"{millicores}m" if rest else str(whole)
