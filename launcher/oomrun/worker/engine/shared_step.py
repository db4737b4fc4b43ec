"""One optimizer step over a batch of which each worker of a group does its share.

Every worker is given the whole batch. It adds up the gradients of its own rows, in
micro-batches and weighted as parts of the whole batch (``cutting.py``); the sums over
all workers go to each worker's optimizer. So all of them take the same step, that of
the whole batch, and none has to wait for another before its own gradients are complete:
one that runs out of memory until then takes its share again with a smaller micro-batch.

What the forward passes have changed is joined, too: metrics hold sums over samples, so
the changes add up; of layers' statistics (BatchNorm) it is the mean, weighted by
samples; a count (random state) is the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from oomrun.core.strategy import Group
from oomrun.worker import pool
from oomrun.worker.engine import cutting, executor, together
from oomrun.worker.engine.applying import Apply
from oomrun.worker.engine.returning import Returned, flat, in_form
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.snapshot import mutable_variables
from oomrun.worker.engine.step import Logs, StepFunction
from oomrun.worker.engine.together import Share

__all__ = ["SharedStep"]


class SharedStep(StepFunction):
    """The compiled steps of one model, with one that all workers of a group take.

    ``run`` still is this worker's own, and changes what the others do not see: for
    trials, which are undone.

    Attributes:
        computed_s: what this worker's gradients took in the last shared step, waiting
            for no other; None where that cannot be told: with several optimizers the
            sums of one come before the gradients of the next.
    """

    def __init__(self, model: Any, group: Group) -> None:
        super().__init__(model)
        self._group = group
        self.computed_s: float | None = None
        self._computed_at: list[tf.Tensor] = []
        self._shared = self._compiled(self._shared_step)

    def run_share(
        self, data: Any, start: int, share: int, micro_batch_size: int, wish: int
    ) -> tuple[Logs, int]:
        """One optimizer step over ``data``, together with all workers.

        Args:
            data: the whole batch.
            start: the first row of this worker's share.
            share: how many rows they are, 0 or more.
            micro_batch_size: rows a pass, at least 1.
            wish: told to all workers.

        Returns:
            The logs that the model's ``train_step`` would return for the whole batch,
            and the sum of all workers' wishes.

        Raises:
            tf.errors.ResourceExhaustedError: see ``applying`` and ``snapshot``.
        """
        self._at_once = False
        if self._how_to_cut.suits_order and pool.limit_bytes() is not None:
            self.run_in_order(whole=False)
        told = [tf.TensorSpec((), tf.int32)] * 4
        self._shared = self._trace("shared", self._shared, self._shared_step, *told)
        self._begin()
        logs, wishes, took_s = together.taken(
            self._shared, data, start, share, micro_batch_size, wish
        )
        self.computed_s = took_s if self._optimizers == 1 else None
        return logs, wishes

    def run_in_order(self, *, whole: bool) -> None:
        """See ``StepFunction``."""
        before = self._in_order
        super().run_in_order(whole=whole)
        if self._in_order and not before:
            self._shared = self._compiled(self._shared_step)
            self._traced.discard("shared")

    def _shared_step(
        self,
        data: Any,
        first: tf.Tensor,
        share: tf.Tensor,
        micro_batch_size: tf.Tensor,
        wish: tf.Tensor,
    ) -> tuple[Logs, tf.Tensor, tf.Tensor]:
        self._computed_at = []
        cut = self._how_to_cut
        cutter = cutting.Cutter(
            self._model,
            self.snapshot,
            compiled=executor.ordered if self._in_order else self._by_xla,
            sums=cut.separability is Separability.SUM,
        )
        metrics = list(self._model.metrics_variables)
        known = {id(variable) for variable in metrics}
        others = [v for v in mutable_variables(self._model) if id(v) not in known]
        before = [tf.identity(v.value) for v in metrics]
        others_before = [tf.identity(v.value) for v in others]
        batch = Share(data, micro_batch_size, first, share)
        returned = cutter.step(batch, self._apply_sums)
        weight = tf.cast(share, tf.float64) / tf.cast(batch.samples, tf.float64)
        # Before the line is crossed nothing may wait for the other workers.
        with tf.control_dependencies([self._line.count()]):
            together.join_state(
                self._group, metrics, before, others, others_before, weight
            )
            names = list(returned.mean)
            *means, wishes = self._group.sums(
                [*returned.mean.values(), wish], "oomrun.told"
            )
        logs = self._logs(returned, dict(zip(names, means, strict=True)))
        at = self._computed_at[0] if self._computed_at else tf.zeros((), tf.float64)
        return logs, wishes, at

    def _apply_sums(self, call: Apply, gradients: Sequence[Any]) -> None:
        """Calls the optimizer with the gradients of all workers, behind the line.

        The line comes first: once a worker has given its sums away it cannot take the
        step again, since the others have gone on.
        """
        self._optimizers = max(self._optimizers, call.index + 1)
        with self._line.after(gradients) as behind:
            self._computed_at.append(together.now_behind(behind))
            name = f"oomrun.gradients.{call.index}"
            call.really(together.summed(self._group, call.gradients, behind, name))

    def _logs(self, returned: Returned, means: Logs) -> Logs:
        """As the step of the whole batch returns it."""
        known = flat(self._model.get_metrics_result())
        logs: Logs = in_form(
            returned.form,
            iter(
                known[name] if name in known else means.get(name, value)
                for name, value in returned.last.items()
            ),
        )
        return logs
