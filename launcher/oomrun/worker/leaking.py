"""Memory that a training takes and never gives back: noticed before it runs out.

Covers: reading what is in use between steps, and saying when to start anew. Does not
cover: what of it is a leak (``oomrun.core.leak``), what follows (``core/policy.py``).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from oomrun.core import events as ev
from oomrun.core.launch import Launch
from oomrun.core.leak import Forecast, Growth
from oomrun.worker import devices

__all__ = ["LeakWatch"]

# Reading costs some 10 us. A fast leak is seen only in samples that lie close.
_SAMPLE_EVERY_S = 0.02
# Samples from the last moment to leave: the forecast has its own uncertainty.
_SAMPLES_AHEAD = 3
# There is nothing to look at before so much of the room has gone, and so much of the
# budget: data that is read ahead comes and goes.
_SUSPECT, _NOT_NOISE = 0.5, 0.05
# Where memory is about to run out few samples must do, each above the one before.
_RISING, _EVEN = 5, 1.5


class LeakWatch:
    """Follows what is in use between the steps of one model, in this process."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._model: Callable[[], Any] = lambda: None
        self._begin()

    def _begin(self) -> None:
        self._growth = Growth()
        self._sampled_at = 0.0
        self._step, self._stride = 0, 1
        self._first: int | None = None
        self._in_use = self._highest = 0
        self._transient = 0  # bytes that a step takes for its own time
        self._recent: deque[int] = deque(maxlen=_RISING)

    def follow(self, model: Any) -> None:
        """The next fit; of another model what is in use says nothing of a leak."""
        if model is not self._model():
            self._model = weakref.ref(model)
            self._begin()

    def after_step(self, step: int, to_come: int | None) -> ev.LeakFound | None:
        """To be called when a step is done and its own tensors are gone.

        Args:
            step: optimizer steps of the run so far.
            to_come: steps until the fit ends; None where that is not known.

        Returns:
            What was found, where it is time to leave.
        """
        now = time.monotonic()
        if now - self._sampled_at < _SAMPLE_EVERY_S or not self._sample(step):
            return None
        self._sampled_at = now
        # Each look costs some ms: not again before it has grown.
        if self._in_use <= self._highest or not self._has_grown():
            return None
        self._highest = self._in_use + self._budget() // 200
        found = self._growth.forecast(self._budget() - self._transient)
        if found is None or not found.confident:
            found = self._fast()
        if found is None or found.soonest_steps_left > _SAMPLES_AHEAD * self._stride:
            return None
        if to_come is not None and found.soonest_steps_left > to_come:
            return None
        return self._found(found)

    def _fast(self) -> Forecast | None:
        """A forecast from the last few samples, where they rise all alike.

        Too few to be sure. But where memory is about to run out, to leave costs no more
        than to stay.
        """
        rises = [b - a for a, b in itertools.pairwise(self._recent)]
        if len(self._recent) < _RISING or not 0 < max(rises) <= _EVEN * min(rises):
            return None
        low, high = min(rises) / self._stride, max(rises) / self._stride
        left = self._budget() - self._transient - self._in_use
        return Forecast(
            bytes_per_step=sum(rises) / len(rises) / self._stride,
            low_bytes_per_step=low,
            high_bytes_per_step=high,
            steps_left=int(left / low),
            soonest_steps_left=int(left / high),
            confident=False,
        )

    def explains_exhaustion(self) -> ev.LeakFound | None:
        """What was found where memory has just run out, if that was a leak's doing."""
        rising = all(a < b for a, b in itertools.pairwise(self._recent))
        if len(self._recent) < _RISING or not rising:
            return None
        return self._found(None) if self._has_grown() else None

    def _has_grown(self) -> bool:
        """Whether there is anything to look at."""
        at_first = self._first or 0
        room = self._budget() - self._transient - at_first
        enough = max(_SUSPECT * room, _NOT_NOISE * self._budget())
        return self._in_use - at_first >= enough

    def _found(self, forecast: Forecast | None) -> ev.LeakFound:
        device, *_ = self._launch.plan.devices
        return ev.LeakFound(
            at=time.time(),
            attempt=self._launch.attempt,
            device=device.id,
            step=self._step,
            bytes_per_step=forecast.bytes_per_step if forecast else 0.0,
            grown_bytes=self._in_use - (self._first or 0),
            budget_bytes=self._budget(),
            steps_left=max(1, forecast.steps_left) if forecast else 0,
        )

    @property
    def in_use_bytes(self) -> int | None:
        """In use when it was last looked, between two steps; None before."""
        return self._in_use if self._first is not None else None

    def _sample(self, step: int) -> bool:
        """Takes what is in use now; whether that says anything."""
        memory, *_ = devices.read_memory(self._launch.plan)
        in_use, peak = memory.in_use_bytes, memory.peak_bytes
        if in_use is None or peak is None or not self._budget():
            return False
        if self._first is None:
            self._first = in_use
        else:
            self._stride = max(1, step - self._step)
        self._step, self._in_use = step, in_use
        self._transient = max(self._transient, peak - in_use)
        self._recent.append(in_use)
        self._growth = self._growth.after(step, in_use)
        return True

    def _budget(self) -> int:
        return self._launch.plan.devices[0].budget_bytes or 0
