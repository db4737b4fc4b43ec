"""One optimizer step of a custom loop, of whose batch each worker does its share.

As ``shared_step.py`` has it for a Keras model: each worker adds up the gradients of its
own rows, the sums over all workers go to each worker's optimizer. What the loss
function writes may be a metric's, a layer's or a random generator's. How the parts of
any other variable would come together cannot be told: ``SharedLossStep.unshared``.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from oomrun.core.strategy import Group
from oomrun.worker.engine import together
from oomrun.worker.engine.loss_step import LossStep
from oomrun.worker.engine.objects import Kept, Objects
from oomrun.worker.engine.together import Share

__all__ = ["SharedLossStep"]


class SharedLossStep(LossStep):
    """The compiled step around one loss function, with one that all workers take.

    Attributes:
        computed_s: what this worker's gradients took in the last shared step, waiting
            for no other; None where that cannot be told.
    """

    def __init__(
        self, loss: Any, optimizer: Any, objects: Objects, group: Group, *, spec: Any
    ) -> None:
        super().__init__(loss, optimizer, objects, undoable=True, spec=spec)
        self._group = group
        self._metrics, self._others, self._bare = _by_owner(objects)
        self.computed_s: float | None = None
        self._shared = tf.function(
            tf.autograph.experimental.do_not_convert(self._shared_step),
            reduce_retracing=True,
        )

    def unshared(self, data: Any) -> str:
        """What the loss function writes that no share can be joined of; "" for none."""
        written = self.cut(data).written
        return next((kept.path for kept in self._bare if id(kept.value) in written), "")

    def run_share(
        self, data: Any, start: int, share: int, micro_batch_size: int, wish: int
    ) -> tuple[tf.Tensor, int]:
        """One optimizer step over ``data``, together with all workers.

        Args:
            data: the whole batch.
            start: the first row of this worker's share.
            share: how many rows they are, 0 or more.
            micro_batch_size: rows a pass, at least 1.
            wish: told to all workers.

        Returns:
            The loss of the whole batch, and the sum of all workers' wishes.

        Raises:
            tf.errors.ResourceExhaustedError: see ``line`` and ``snapshot``.
        """
        self._begin()
        loss, wishes, self.computed_s = together.taken(
            self._shared, data, start, share, micro_batch_size, wish
        )
        return loss, wishes

    def _shared_step(
        self,
        data: Any,
        first: tf.Tensor,
        share: tf.Tensor,
        micro_batch_size: tf.Tensor,
        wish: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        before = [tf.identity(kept.value) for kept in self._metrics]
        others_before = [tf.identity(kept.value) for kept in self._others]
        batch = Share(data, micro_batch_size, first, share)
        own, example, gradients = self._passes(batch)
        with self.line.after(gradients) as behind:
            at = together.now_behind(behind)
            sums = together.summed(self._group, example, behind, "oomrun.gradients.0")
            self._optimizer.apply_gradients(zip(sums, self._weights, strict=True))
        weight = tf.cast(share, tf.float64) / tf.cast(batch.samples, tf.float64)
        # Before the line is crossed nothing may wait for the other workers.
        with tf.control_dependencies([self.line.count()]):
            together.join_state(
                self._group, self._metrics, before, self._others, others_before, weight
            )
            loss, wishes = self._group.sums([own, wish], "oomrun.told")
        return loss, wishes, at


def _by_owner(objects: Objects) -> tuple[list[Kept], list[Kept], list[Kept]]:
    """What a forward pass may change: of metrics, of layers and generators, of none."""
    generators = tf.random.Generator | keras.random.SeedGenerator
    owned = [variable for layer in objects.layers for variable in layer.variables]
    owned += [thing.state for thing in objects.things if isinstance(thing, generators)]
    known = {id(v.value if isinstance(v, keras.Variable) else v) for v in owned}
    metrics, others, bare = [], [], []
    for kept in objects.non_trainable_variables:
        if objects.metric_of(kept):
            metrics.append(kept)
        elif id(kept.value) in known:
            others.append(kept)
        else:
            bare.append(kept)
    return metrics, others, bare
