"""When the micro-batch of a training is looked for: before its first step, and again.

Covers: doing so for the first batch, for one of more rows and for one of larger
samples; only measuring, where nothing is to be trained. Does not cover: the trials
(``probing.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oomrun.worker import announcing, measuring
from oomrun.worker.engine import keeping, slicing
from oomrun.worker.probing import Prober, TrialStep
from oomrun.worker.session import Session

__all__ = ["Search"]

# A batch whose samples are so much larger than any before (longer sequences, larger
# images) is looked at anew; before that where what was recorded leaves less room.
_LARGER, _LEAST_LARGER = 1.15, 1.01


class Search:
    """The search for the micro-batch of one model, or of one loop's objects.

    Args:
        session: the training it is part of.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prober: Prober | None = None
        self._planned = False
        # Rows, and bytes of a row, of the largest batch that a size was found for.
        self._rows, self._row_bytes = 0, 0.0

    def before_step(
        self,
        model: Any,
        function: TrialStep,
        data: Any,
        samples: int,
        may_cut: Callable[[], bool],
        *,
        of_group: bool = False,
    ) -> None:
        """Finds and reports the micro-batch for a batch, where none is known for it.

        Args:
            model: built and compiled, or what stands for one.
            function: its step.
            data: the batch that is to be trained.
            samples: its rows.
            may_cut: whether batches can be cut; asked only if they may have to be.
            of_group: this worker is one of several: what is found is not told before
                it is known what all of them have found.
        """
        session, sizes = self._session, self._session.micro_batches
        if session.launch.measure:
            prober = Prober(session, model, function)
            measuring.measure(session, prober, model, data, samples, may_cut)
        if not sizes.probes:
            if samples > self._rows:
                self._rows = samples
                announcing.state_measured(session, model, data, samples, {})
            return
        row = slicing.bytes_of(data) / max(1, samples)
        larger = row / self._row_bytes if self._row_bytes else 1.0
        room = self._prober.room if self._prober else _LARGER
        if samples <= self._rows and larger <= max(_LEAST_LARGER, min(_LARGER, room)):
            return
        self._rows = max(self._rows, samples)
        self._row_bytes = max(self._row_bytes, row)
        before = sizes.size(samples)
        if self._prober is None:
            beside = keeping.bytes_of(model.trainable_variables) if of_group else 0
            self._prober = Prober(session, model, function, beside)
        found = self._prober.settle(data, samples, may_cut, max(1.0, larger))
        announcing.state_measured(
            session, model, data, samples, self._prober.graph.peaks
        )
        if of_group:
            announcing.sizes_tried(session, self._prober.tried, sizes.recorded)
        if found is not None and of_group:
            sizes.settle(found.size, samples)
        elif found is not None and (not self._planned or found.size != before):
            self._planned = True
            announcing.micro_batch_planned(
                session, found.size, samples, found.reason, found.peak
            )

    def elsewhere(self, samples: int, at_most: int, budget_bytes: int) -> int:
        """The size for a further device of this process; see ``Prober.elsewhere``."""
        if self._prober is None:
            return at_most
        return self._prober.elsewhere(samples, at_most, budget_bytes)
