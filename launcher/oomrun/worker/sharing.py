"""A worker's share of each global batch, agreed on with the others of its group.

Covers: telling each other what fits, the share that follows, the step taken together,
the end where one of them has gone. Does not cover: the arithmetic of shares
(``oomrun.core.shares``), the step itself (``engine/shared_step.py``).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from oomrun.core import events as ev
from oomrun.core.launch import EXIT_LOST
from oomrun.core.shares import Part, Replica, Shares, share_out
from oomrun.core.strategy import Group
from oomrun.worker.engine.shared_step import SharedStep
from oomrun.worker.session import Session

__all__ = ["Sharing"]


class Sharing:
    """One model's training in a group.

    Args:
        session: the training it is part of.
        group: the workers.
        model: built, its variables restored.
    """

    def __init__(self, session: Session, group: Group, model: Any) -> None:
        self._session, self._group, self._model = session, group, model
        self.function = SharedStep(model, group)
        self._replicas: list[Replica] = []
        self._largest = 0
        self._shares: dict[int, Shares] = {}
        self._told: tuple[int, int] | None = None

    def begin(self) -> None:
        """Has all workers start with the weights of the first.

        A script may seed its layers from the system, which is another seed for each.
        """
        variables = [*self._model.variables, *self._model.optimizer.variables]
        self._group.take_from_first(
            [v.value for v in variables if v.value.dtype != tf.string],
            "oomrun.first",
        )

    def agree(self, samples: int) -> None:
        """Before a batch of so many rows: what fits into each worker, if it is news."""
        if samples <= self._largest:
            return
        self._largest = samples
        own = self._session.micro_batches.size(samples)
        sizes = self._group.joined(tf.constant([own]), "oomrun.sizes")
        self._replicas = [Replica(int(size)) for size in np.asarray(sizes)]
        self._shares = {}

    def part(self, samples: int) -> Part:
        """This worker's share of a batch of so many rows."""
        if samples not in self._shares:
            self._shares[samples] = share_out(samples, self._replicas)
        return self._shares[samples].parts[self._group.rank]

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
        try:
            logs, wishes = self.function.run_share(
                data, part.start, part.share, size, wish
            )
        except tf.errors.ResourceExhaustedError:
            raise
        except Exception as error:
            if self._group.lost(error):
                print(f"oomrun: another worker has gone: {error}", flush=True)
                session.leave_for_restart(EXIT_LOST)
            raise
        session.stop_agreed = wishes > 0
        session.pass_size = size
        return logs

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
