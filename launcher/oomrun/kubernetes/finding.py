"""Collecting what is wrong with an object, and looking into one that may be anything.

Covers: ``Findings``, and reading fields of unknown types without a fault. Does not
cover: what is wrong (``lint`` and the modules beside it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from oomrun.core.jobfile.nodes import shorten

__all__ = ["Finding", "Findings", "dig", "listing", "mapping"]


class Finding(NamedTuple):
    """One thing that is wrong with an object."""

    path: str
    message: str
    hint: str = ""


class Findings:
    """What was found so far in one object."""

    def __init__(self, prefix: str = "") -> None:
        self.found: list[Finding] = []
        self._prefix = prefix

    def below(self, path: str) -> Findings:
        """The same findings, for whoever knows only what is below the path."""
        inner = Findings(f"{self._prefix}{path}.")
        inner.found = self.found
        return inner

    def add(self, path: str, message: str, hint: str = "") -> None:
        """Something is wrong with what stands at the path."""
        # The file's own words are in it: on one line, without control characters.
        self.found.append(
            Finding(
                shorten(self._prefix + path, 200),
                shorten(message, 400),
                shorten(hint, 200),
            )
        )

    def one_of(self, value: Any, path: str, known: Iterable[str]) -> None:
        """The value, if there is one, must be one of the known words."""
        words = list(known)
        if value is not None and value not in words:
            self.add(path, f"expected {' or '.join(words)}, got {value}")

    def fits(self, value: Any, path: str, good: bool, words: str) -> None:
        """The value was looked at, and must be good."""
        if not good:
            self.add(path, f"expected {words}, got {value!r}")


def mapping(value: Any) -> dict[str, Any]:
    """The value, or an empty mapping where it is none: schemas tell the type."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """The value, or an empty list where it is none."""
    return value if isinstance(value, list) else []


def dig(value: Any, *keys: str) -> Any:
    """What is below the keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value
