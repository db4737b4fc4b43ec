"""The devices of this process, and what each does of a global batch.

Covers: what fits on each, the share that follows, the step taken on all of them, whose
memory it was that ran out. Does not cover: the arithmetic of shares
(``oomrun.core.shares``), the step itself (``engine/mirrored_step.py``), devices of
other processes (``sharing.py``).
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from oomrun.core import events as ev
from oomrun.core.shares import Part, Replica, Shares, share_out
from oomrun.worker import devices
from oomrun.worker.channel import OfOneDevice
from oomrun.worker.engine.mirrored_step import MirroredStep
from oomrun.worker.recovery import MicroBatches
from oomrun.worker.searching import Search
from oomrun.worker.session import Session

__all__ = ["Mirroring"]

# "OOM when allocating tensor with shape[…] on /job:localhost/…/device:GPU:1 by …"
_WHERE = re.compile(r"on /job:\S*/device:[A-Z]+:(\d+)")


class Mirroring:
    """One model's training on several devices.

    Args:
        session: the training it is part of.
        model: built, its variables restored.
        search: what knows of the first device what fits.
    """

    def __init__(self, session: Session, model: Any, search: Search) -> None:
        self._session, self._search = session, search
        plan = session.launch.plan
        self.function = MirroredStep(model, devices.names(plan))
        self._sizes = [session.micro_batches]
        for rank, device in enumerate(plan.devices[1:], start=1):
            own = replace(
                session.launch,
                rank=rank,
                plan=replace(plan, devices=(device,)),
                measured={},
                recorded={},
                micro_batch_failed=None,
            )
            self._sizes.append(MicroBatches(own, OfOneDevice(session.channel)))
        self._replicas: list[Replica] = []
        self._largest = 0
        self._shares: dict[int, Shares] = {}
        self._told: list[tuple[int, int] | None] = [None] * len(plan.devices)
        self._passes: list[int] = []

    def agree(self, samples: int) -> None:
        """Before a batch of so many rows: what fits on each device, if it is news."""
        if samples <= self._largest:
            return
        self._largest = samples
        self._replicas = [Replica(self._fitting(own, samples)) for own in self._sizes]
        self._shares = {}

    def _fitting(self, own: MicroBatches, samples: int) -> int:
        most = own.size(samples)
        if own is self._session.micro_batches or not own.probes:
            return most
        found = self._search.elsewhere(samples, most, own.budget_bytes)
        own.settle(found, samples)
        return found

    def micro_batch_size(self, samples: int) -> int:
        """Rows of the first device's pass, at least 1 also for an empty share."""
        self._passes = [
            # What fits may be less by now than what the share was planned with.
            max(1, min(part.micro_batch_size or 1, own.size(max(1, part.share))))
            for part, own in zip(self._parts(samples), self._sizes, strict=True)
        ]
        return self._passes[0]

    def _parts(self, samples: int) -> tuple[Part, ...]:
        if samples not in self._shares:
            self._shares[samples] = share_out(samples, self._replicas)
        return self._shares[samples].parts

    def step(self, data: Any, samples: int, size: int) -> Any:
        """The step over ``data``, by all devices; see ``MirroredStep.run_mirrored``."""
        parts, session = self._parts(samples), self._session
        self._tell(samples, parts)
        for own in self._sizes:
            own.step = session.step
        logs = self.function.run_mirrored(data, parts, self._passes)
        for own, done in zip(self._sizes[1:], self._passes[1:], strict=True):
            own.ran(done)
        session.pass_size = size
        return logs

    def blamed(self, message: str) -> list[tuple[MicroBatches, int, str]]:
        """Whose memory has run out, the size of its passes, and TensorFlow's text.

        Args:
            message: the text of the error that was raised.
        """
        # In the passes it is known; else it was in what is done with their sums.
        found = self.function.exhausted or {self._named(message): message}
        return [
            (self._sizes[index], self._passes[index], text)
            for index, text in found.items()
        ]

    def _named(self, message: str) -> int:
        found = _WHERE.search(message)
        index = int(found[1]) if found else len(self._sizes)
        return index if index < len(self._sizes) else self._fullest()

    def _fullest(self) -> int:
        """For a message that names no device."""
        memory = devices.read_memory(self._session.launch.plan)
        used = [(d.peak_bytes or 0) / (d.limit_bytes or 1) for d in memory]
        return max(range(len(used)), key=lambda n: (used[n], self._passes[n]))

    def _tell(self, samples: int, parts: tuple[Part, ...]) -> None:
        """Tells the shares of whole batches, and which micro-batch has changed."""
        if samples < self._largest:
            return
        launch = self._session.launch
        for rank, (part, size) in enumerate(zip(parts, self._passes, strict=True)):
            if self._told[rank] == (part.share, size):
                continue
            self._told[rank] = (part.share, size)
            self._session.channel.send(
                ev.SharePlanned(
                    at=time.time(),
                    attempt=launch.attempt,
                    rank=rank,
                    device=launch.plan.devices[rank].id,
                    global_batch_size=samples,
                    share=part.share,
                    micro_batch_size=size,
                    reason=self._shares[samples].reason,
                )
            )
