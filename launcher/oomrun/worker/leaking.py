"""Memory that a training takes and never gives back: noticed before it runs out.

Covers: reading what is in use between steps, on the first device and of the host, and
saying when to start anew. Does not cover: what of it is a leak (``oomrun.core.leak``),
what follows (``core/policy.py``), host memory that other processes of the script hold.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from oomrun import host
from oomrun.core import events as ev
from oomrun.core.launch import Launch
from oomrun.core.leak import Forecast, Growth
from oomrun.core.topology import HOST_ID
from oomrun.worker import checkpointing, devices

__all__ = ["LeakWatch"]

# Samples from the last moment to leave: the forecast has its own uncertainty.
_SAMPLES_AHEAD = 3
# There is nothing to look at before so much of the room has gone, and so much of the
# budget: data that is read ahead comes and goes.
_SUSPECT, _NOT_NOISE = 0.5, 0.05
# Where memory is about to run out few samples must do, each above the one before.
_RISING, _EVEN = 5, 1.5


class LeakWatch:
    """Follows what is in use between the steps of one model, in this process.

    Args:
        launch: whose first device is watched.
        workers: processes that may share the host's memory with this one, it included.
    """

    def __init__(self, launch: Launch, workers: int = 1) -> None:
        self._model: Callable[[], Any] = lambda: None
        self._on_device = _Watch(launch, _OnDevice(launch))
        self._on_host = _Watch(launch, _OnHost(self._the_model, workers))

    def _the_model(self) -> Any:
        return self._model()

    def follow(self, model: Any) -> None:
        """The next fit; of another model what is in use says nothing of a leak."""
        if model is not self._model():
            self._model = weakref.ref(model)
            self._on_device.begin()
            self._on_host.begin()

    def after_step(self, step: int, to_come: int | None) -> ev.LeakFound | None:
        """To be called when a step is done and its own tensors are gone.

        Args:
            step: optimizer steps of the run so far.
            to_come: steps until the fit ends; None where that is not known.

        Returns:
            What was found, where it is time to leave.
        """
        return self._on_device.after_step(step, to_come) or self._on_host.after_step(
            step, to_come
        )

    def explains_exhaustion(self) -> ev.LeakFound | None:
        """What was found where the device has just run out, if a leak's doing."""
        return self._on_device.explains_exhaustion()

    @property
    def in_use_bytes(self) -> int | None:
        """In use on the device when it was last looked, between two steps."""
        return self._on_device.in_use_bytes


@dataclass(frozen=True, slots=True)
class _Reading:
    """Bytes in use at rest, what a step takes on top for its own time, what may be."""

    in_use: int
    transient: int
    budget: int


class _Place(Protocol):
    """Where memory is looked at."""

    name: str
    at_once: int  # samples, of which none waits for ``every_s``
    every_s: float

    def read(self) -> _Reading | None:
        """What is in use now; None where that cannot be told."""


class _OnDevice:
    """The first device of this worker."""

    # Reading costs some 10 us. A fast leak is seen only in samples that lie close: one
    # of each step, however short, until it would have filled memory.
    at_once, every_s = 64, 0.02

    def __init__(self, launch: Launch) -> None:
        self._plan = launch.plan
        self.name = launch.plan.devices[0].id

    def read(self) -> _Reading | None:
        memory, *_ = devices.read_memory(self._plan)
        budget = self._plan.devices[0].budget_bytes or 0
        if memory.in_use_bytes is None or memory.peak_bytes is None or not budget:
            return None
        transient = memory.peak_bytes - memory.in_use_bytes
        return _Reading(memory.in_use_bytes, transient, budget)


class _OnHost:
    """What this process holds of the host's memory."""

    name = HOST_ID
    at_once, every_s = 0, 0.2
    # What may still be taken costs a look into some files, and changes slowly.
    _LOOK_EVERY_S = 1.0

    def __init__(self, model: Callable[[], Any], workers: int) -> None:
        self._model, self._workers = model, workers
        self._looked_at, self._budget = 0.0, 0

    def read(self) -> _Reading | None:
        in_use = host.own_bytes()
        if in_use is None:
            return None
        now = time.monotonic()
        if now - self._looked_at >= self._LOOK_EVERY_S:
            self._looked_at = now
            room = host.room_bytes() // self._workers
            # The checkpoint that we leave with needs a copy of all variables.
            model = self._model()
            copy = 0 if model is None else checkpointing.state_bytes(model)
            self._budget = in_use + room - min(copy, room // 4)
        return _Reading(in_use, 0, self._budget)


class _Watch:
    """Follows what is in use at one place."""

    def __init__(self, launch: Launch, place: _Place) -> None:
        self._launch, self._place = launch, place
        self.begin()

    def begin(self) -> None:
        """Forgets all."""
        self._growth = Growth()
        self._sampled_at, self._samples = 0.0, 0
        self._step, self._stride = 0, 1
        self._first: int | None = None
        self._in_use = self._highest = self._budget = 0
        self._transient = 0  # bytes that a step takes for its own time
        self._recent: deque[int] = deque(maxlen=_RISING)

    def after_step(self, step: int, to_come: int | None) -> ev.LeakFound | None:
        """As of ``LeakWatch``."""
        now = time.monotonic()
        waiting = now - self._sampled_at < self._place.every_s
        if waiting and self._samples >= self._place.at_once:
            return None
        if not self._sample(step):
            return None
        self._sampled_at = now
        # Each look costs some ms: not again before it has grown.
        if self._in_use <= self._highest or not self._has_grown():
            return None
        self._highest = self._in_use + self._budget // 200
        found = self._growth.forecast(self._budget - self._transient)
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
        left = self._budget - self._transient - self._in_use
        return Forecast(
            bytes_per_step=sum(rises) / len(rises) / self._stride,
            low_bytes_per_step=low,
            high_bytes_per_step=high,
            steps_left=int(left / low),
            soonest_steps_left=int(left / high),
            confident=False,
        )

    def explains_exhaustion(self) -> ev.LeakFound | None:
        """As of ``LeakWatch``, of this place."""
        rising = all(a < b for a, b in itertools.pairwise(self._recent))
        if len(self._recent) < _RISING or not rising:
            return None
        return self._found(None) if self._has_grown() else None

    def _has_grown(self) -> bool:
        """Whether there is anything to look at."""
        at_first = self._first or 0
        room = self._budget - self._transient - at_first
        enough = max(_SUSPECT * room, _NOT_NOISE * self._budget)
        return self._in_use - at_first >= enough

    def _found(self, forecast: Forecast | None) -> ev.LeakFound:
        return ev.LeakFound(
            at=time.time(),
            attempt=self._launch.attempt,
            device=self._place.name,
            step=self._step,
            bytes_per_step=forecast.bytes_per_step if forecast else 0.0,
            grown_bytes=self._in_use - (self._first or 0),
            budget_bytes=self._budget,
            steps_left=max(1, forecast.steps_left) if forecast else 0,
        )

    @property
    def in_use_bytes(self) -> int | None:
        """In use when it was last looked; None before."""
        return self._in_use if self._first is not None else None

    def _sample(self, step: int) -> bool:
        """Takes what is in use now; whether that says anything."""
        found = self._place.read()
        if found is None:
            return False
        in_use, self._budget = found.in_use, found.budget
        if self._first is None:
            self._first = in_use
        else:
            self._stride = max(1, step - self._step)
        self._samples += 1
        self._step, self._in_use = step, in_use
        self._transient = max(self._transient, found.transient)
        self._recent.append(in_use)
        self._growth = self._growth.after(step, in_use)
        return True
