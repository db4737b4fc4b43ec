"""A worker's share of each global batch, agreed on with the others of its group.

Covers: telling each other what fits and how fast each is, the share that follows, the
step taken together, the end where one of them has gone. Does not cover: the arithmetic
of shares and speeds (``oomrun.core``), the step itself (``engine``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from oomrun.core import events as ev
from oomrun.core import speeds
from oomrun.core.batch import accumulation_steps
from oomrun.core.launch import EXIT_LOST
from oomrun.core.shares import Part, Replica, Shares, Speed, share_out
from oomrun.core.speeds import Timing
from oomrun.core.strategy import Group
from oomrun.worker.session import Session

__all__ = ["Sharing"]


class Shared(Protocol):
    """A step that all workers take: ``SharedStep``, ``SharedLossStep``."""

    computed_s: float | None

    def run_share(
        self, data: Any, start: int, share: int, micro_batch_size: int, wish: int
    ) -> tuple[Any, int]:
        """One optimizer step over ``data``: what it returns, the sum of wishes."""


class Sharing:
    """The training of one model, or of a loop's objects, in a group.

    Args:
        session: the training it is part of.
        group: the workers.
        function: the step that they take together.
    """

    def __init__(self, session: Session, group: Group, function: Shared) -> None:
        self._session, self._group = session, group
        self._function = function
        self._replicas: list[Replica] = []
        self._largest = 0
        self._shares: dict[int, Shares] = {}
        self._told: tuple[int, int] | None = None
        self._times = _Times()

    def begin(self, variables: Iterable[Any]) -> None:
        """Has all workers start with the first one's values of ``variables``.

        A script may seed its layers from the system, which is another seed for each.
        """
        with self._together():
            self._group.take_from_first(
                [v.value for v in variables if v.value.dtype != tf.string],
                "oomrun.first",
            )

    def agree(self, samples: int) -> None:
        """Before a batch of so many rows: what fits into each worker, if it is news.

        And whether other shares would be faster, once enough steps were timed.
        """
        if samples > self._largest:
            self._largest = samples
            self._replicas = [Replica(known.micro_batch_max) for known in self._all()]
            self._shares = {}
        elif self._times.full and self._session.launch.shares == "auto":
            self._times.next_window()
            replicas, largest = self._all(), self._largest
            found = speeds.worth(largest, self._of(largest), replicas)
            if found is not None:
                self._replicas, self._shares = replicas, {largest: found}

    def _all(self) -> list[Replica]:
        """What each worker knows of itself, the same list in all of them."""
        own = self._session.micro_batches.size(self._largest)
        speed = self._times.speed or Speed(0.0, 0.0)
        row = [[float(own), speed.pass_s, speed.sample_s]]
        with self._together():
            rows = self._group.joined(tf.constant(row, tf.float64), "oomrun.sizes")
        return [
            Replica(int(size), Speed(pass_s, sample_s) if sample_s > 0 else None)
            for size, pass_s, sample_s in np.asarray(rows).tolist()
        ]

    def part(self, samples: int) -> Part:
        """This worker's share of a batch of so many rows."""
        return self._of(samples).parts[self._group.rank]

    def _of(self, samples: int) -> Shares:
        if samples not in self._shares:
            self._shares[samples] = share_out(samples, self._replicas)
        return self._shares[samples]

    def micro_batch_size(self, samples: int) -> int:
        """Rows a pass, at least 1 also for an empty share."""
        part = self.part(samples)
        # What fits may be less by now than what the share was planned with.
        most = self._session.micro_batches.size(max(1, part.share))
        return max(1, min(part.micro_batch_size or 1, most))

    def step(self, data: Any, samples: int, size: int) -> Any:
        """The step over ``data``, by all workers; see ``SharedStep.run_share``."""
        part, session = self.part(samples), self._session
        self._tell(samples, part, size)
        wish = int(session.channel.stop_requested.is_set())
        with self._together():
            logs, wishes = self._function.run_share(
                data, part.start, part.share, size, wish
            )
        passes = accumulation_steps(part.share, size) if part.share else 0
        self._times.add(
            passes,
            part.share,
            self._function.computed_s,
            whole=samples == self._largest,
        )
        session.stop_agreed = wishes > 0
        session.pass_size = size
        return logs

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all workers do at once: leaves where another one has gone."""
        try:
            yield
        except Exception as error:
            # Also where memory ran out: another worker's error may be handed on to us.
            if self._group.lost(error):
                print(f"oomrun: another worker has gone: {error}", flush=True)
                self._session.leave_for_restart(EXIT_LOST)
            raise

    def _tell(self, samples: int, part: Part, size: int) -> None:
        """Tells the share of whole batches, and when its micro-batch has changed."""
        if samples < self._largest or self._told == (part.share, size):
            return
        self._told = (part.share, size)
        launch = self._session.launch
        self._session.channel.send(
            ev.SharePlanned(
                at=time.time(),
                attempt=launch.attempt,
                rank=launch.rank,
                device=launch.plan.devices[0].id,
                global_batch_size=samples,
                share=part.share,
                micro_batch_size=size,
                reason=self._shares[samples].reason,
            )
        )


class _Times:
    """What this worker's shares took, in this window of steps and in the last.

    Counted in steps, not in time: so it is full in all workers at once.
    """

    def __init__(self) -> None:
        self.speed: Speed | None = None
        self._window = speeds.FIRST_WINDOW
        self._steps = 0
        self._now: list[Timing] = []
        self._before: list[Timing] = []
        self._seen: set[tuple[int, int]] = set()

    @property
    def full(self) -> bool:
        """Whether it is time to look at them."""
        return self._steps >= self._window

    def add(
        self, passes: int, samples: int, seconds: float | None, *, whole: bool
    ) -> None:
        """One more step; ``whole``: over a batch of full size."""
        self._steps += whole
        key = (passes, samples)
        # The first of a kind may have been compiled, or have its memory taken.
        if key in self._seen and seconds is not None:
            self._now.append(Timing(passes, samples, seconds))
        self._seen.add(key)

    def next_window(self) -> None:
        """Takes the speed from them, and begins a longer window."""
        found = speeds.fitted([*self._before, *self._now])
        # One that does nothing keeps the speed that it had.
        self.speed = found or self.speed
        self._before, self._now = self._now, []
        self._steps, self._window = 0, speeds.longer(self._window)
