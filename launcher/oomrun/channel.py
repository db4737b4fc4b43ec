"""The supervisor's end of the socket to a worker: bytes into JSON values and back.

Covers: lines that arrive in pieces, too long or as garbage. Does not cover: the socket
(``processes``) and what a value means (``core.events``).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Lines", "encode"]

_log = logging.getLogger(__name__)

_LONGEST_LINE = 1024 * 1024
_SHOWN = 3  # the rest is only counted


class Lines:
    """Collects bytes and gives back the JSON values of the lines they complete.

    Attributes:
        skipped: lines that were no JSON or too long.
        bytes_fed: bytes seen so far.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.bytes_fed = 0
        self._rest = b""
        self._overlong = False

    def feed(self, chunk: bytes) -> list[Any]:
        """The values of the lines that ``chunk`` completes."""
        self.bytes_fed += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        values = [value for line in lines if (value := self._value(line)) is not None]
        if len(self._rest) > _LONGEST_LINE:
            # Its beginning is dropped now, and its end when it comes.
            self._rest = b""
            self._overlong = True
        return values

    def _value(self, line: bytes) -> Any:
        if self._overlong:
            self._overlong = False
            self._skip(f"a line of more than {_LONGEST_LINE} bytes")
            return None
        if not line.startswith(b"{"):
            # Told apart at once: whoever writes garbage writes a lot of it.
            self._skip(repr(line[:80]))
            return None
        try:
            return json.loads(line, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            self._skip(repr(line[:80]))
            return None

    def _skip(self, what: str) -> None:
        self.skipped += 1
        if self.skipped <= _SHOWN:
            _log.warning("the worker sent something that is no message: %s", what)


def _no_constant(_: str) -> None:
    """NaN and infinities are no JSON: a loss that is not finite is not known."""


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def encode(message: Mapping[str, Any]) -> bytes:
    """A message to the worker as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
