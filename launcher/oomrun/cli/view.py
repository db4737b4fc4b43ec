"""What `oomrun run` shows while it runs: a live view on a terminal, lines elsewhere.

Covers: choosing one. Does not cover: what each says (``live.py``, ``plain.py``,
``core.words``).

An observer never raises and never holds the run up: where its output goes away, it
falls silent.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Protocol, TextIO

from oomrun.cli.plain import LineWriter, json_line, plain_line
from oomrun.core import events as ev
from oomrun.core.state import JobState

__all__ = ["FORMS", "Observer", "make_observer"]

FORMS = ("auto", "live", "plain", "json")


class Observer(Protocol):
    """Sees every event, with the state after it; use it as a context manager."""

    def __call__(self, state: JobState, event: ev.Event) -> None:
        """Shows what happened."""

    def __enter__(self) -> Observer: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_observer(stream: TextIO, *, force: str = "auto") -> Observer:
    """The observer for ``stream``.

    Args:
        stream: where it writes.
        force: one of ``FORMS``; ``auto`` is live on a terminal that can do it.
    """
    if force not in FORMS:
        raise ValueError(f"force is one of {', '.join(FORMS)}, got {force!r}")
    if force == "json":
        return LineWriter(stream, json_line)
    if force == "plain" or (force == "auto" and not _can_be_live(stream)):
        return LineWriter(stream, plain_line)
    # rich takes 50 ms to import, which no other form should pay.
    from oomrun.cli.live import LiveView

    return LiveView(stream)


def _can_be_live(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
