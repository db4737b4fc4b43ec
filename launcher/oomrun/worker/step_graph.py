"""What the graph of a model's step tells before one was taken.

Covers: tracing it for the shapes of a batch, what it says of sizes, whether its
operations can be run one at a time. Does not cover: the analysis (``engine/static.py``)
and what follows (``probing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from oomrun.core.convolutions import Buffer
from oomrun.worker import pool
from oomrun.worker.engine import convolutions, executor, slicing, static

__all__ = ["StepGraph", "Traceable"]


class Traceable(Protocol):
    """A step of which there may be a graph."""

    @property
    def by_xla(self) -> bool:
        """Whether XLA compiles it."""

    def graph_function(self) -> Any:
        """Its concrete function for batches of any size; None where there is none."""

    def for_spec(self, change: Callable[[Any], Any]) -> Any:
        """The same for batches of another spec."""

    def without_xla(self) -> Any:
        """The same as XLA is given it."""


class StepGraph:
    """Of one model's step.

    Args:
        model: built and compiled, or the objects of a custom loop.
        function: its step.

    Attributes:
        peaks: what the graph says, by rows of a batch.
        guess: bytes by rows to begin with: those, or what is known of smaller samples.
        buffers: that operations take on a CPU beside what it shows.
        suits: whether its operations can be run one at a time, where that helps.
        loops: whether it does not show all that a step keeps.
    """

    def __init__(self, model: Any, function: Traceable) -> None:
        self._model, self._function = model, function
        self._traced: Any = None
        self._step: Any = function
        self.peaks: dict[int, static.GraphPeak] = {}
        self.guess: dict[int, int] = {}
        self.buffers: tuple[Buffer, ...] = ()
        self.suits = self.loops = False

    def ask(self, data: Any, samples: int) -> None:
        """Traces it for batches like ``data``, and takes its figure for the whole."""
        function = self._traced = self._trace(data)
        if function is None:
            self.guess, self.suits = {}, False
            return
        limited = pool.limit_bytes() is not None and not self._function.by_xla
        self.suits = limited and executor.suits(function.graph)
        self.loops = static.has_loops(function.graph)
        self.peaks = {}  # of another shape
        self.look(data, [samples])
        on_cpu = pool.limit_bytes() is not None
        self.buffers = convolutions.buffers_in(function.graph) if on_cpu else ()
        self.guess = {size: peak.bytes for size, peak in self.peaks.items()}
        least = static.least_bytes(self._model, samples)
        if least > self.guess.get(samples, least):
            # It has not seen the most of it, as with loops.
            self.guess, self.loops = {samples: least}, True

    def look(self, data: Any, sizes: Iterable[int]) -> None:
        """Adds what the graph says of batches of so many rows to ``peaks``."""
        if self._traced is None:
            self._traced = self._trace(data)
        missing = [size for size in dict.fromkeys(sizes) if size not in self.peaks]
        if self._traced is not None and missing:
            self.peaks |= static.peaks(self._traced, data, missing)

    def samples_grew(self, samples: int, before_bytes: int, larger: float) -> None:
        """Longer sequences, larger images: a guess instead of what is known.

        As much more as the samples are larger. To trace a graph for each length would
        take seconds; trials will show how far off it is.

        Args:
            samples: rows of a batch.
            before_bytes: the most that so many of the smaller ones are known to take.
            larger: how much larger they have become.
        """
        most = max([before_bytes, *self.guess.values()])
        self.guess = {samples: int(most * larger)} if most else {}

    def _trace(self, data: Any) -> Any:
        """The graph of a step over batches like ``data``; None where there is none."""
        # One for sequences of any length says nothing of how long they are.
        known = self._function.for_spec(lambda spec: slicing.with_shapes_of(spec, data))
        self._step = known.without_xla()  # its graph needs it to live on
        return self._step.graph_function()
