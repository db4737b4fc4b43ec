"""The steps of a custom loop, and what if one does not fit.

Covers: making the step with the first batch, taking it, undoing one that ran out of
memory and taking it again. Does not cover: the step (``engine``), the micro-batch that
is tried next (``recovery.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from oomrun.core.strategy import Group
from oomrun.worker import batch_spec, model_key
from oomrun.worker.engine import returning, slicing
from oomrun.worker.engine.loss_cutting import Cut
from oomrun.worker.engine.loss_step import LossStep
from oomrun.worker.engine.objects import Objects
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.shared_loss_step import SharedLossStep
from oomrun.worker.searching import Search
from oomrun.worker.session import Session
from oomrun.worker.sharing import Sharing
from oomrun.worker.values import Values

__all__ = ["Trained", "Training"]


_NOT_CUT = (
    "oomrun.Loop cannot share its batches out over several devices: they cannot be cut "
    "into parts, and the run's notes say why. Write `strategy: single` in the job file"
)
_NOT_SHARED = (
    "oomrun.Loop: the loss function writes the variable {}. Over several devices each "
    "would write its own, and how these come together cannot be told: keep what it "
    "counts in a keras.metrics object, or write `strategy: single` in the job file"
)


class Trained:
    """What a loop trains, and the step that does it, made with the first batch."""

    def __init__(self, loss: Any, optimizer: Any, objects: Objects) -> None:
        # As ``tf.function`` would have done with it.
        context = tf.__internal__.autograph.control_status_ctx()
        self.loss = tf.__internal__.autograph.tf_convert(loss, context)
        self._name = getattr(loss, "__name__", type(loss).__name__)
        self._optimizer, self.objects = optimizer, objects
        self.values = Values()
        self._step: LossStep | None = None
        self._sharing: Sharing | None = None

    def step(self, data: Any, *, undoable: bool) -> LossStep:
        """The step, compiled when it is first taken."""
        if self._step is None:
            self.objects.build(self.loss, data)
            self._step = LossStep(
                self.loss,
                self._optimizer,
                self.objects,
                undoable=undoable,
                spec=slicing.specs_of(data) if undoable else None,
            )
        return self._step

    def shared(self, data: Any, session: Session, group: Group) -> Sharing:
        """The step that all workers of a group take, and each one's share of it."""
        if self._sharing is None:
            self.objects.build(self.loss, data)
            self._step = step = SharedLossStep(
                self.loss,
                self._optimizer,
                self.objects,
                group,
                spec=slicing.specs_of(data),
            )
            self._sharing = Sharing(session, group, step)
            self._sharing.begin(self.objects.variables)
            if unshared := step.unshared(data):
                raise RuntimeError(_NOT_SHARED.format(unshared))
        return self._sharing

    def key(self, data: Any) -> str | None:
        """What makes this the same training in another run, by ``model_key``."""
        objects = self.objects
        return model_key.key_of_loop(self.loss, objects.things, objects.trained(), data)

    def fingerprint(self, epochs: int) -> dict[str, Any]:
        """What makes this the same loop in another run of the script."""
        return {
            "loop": self._name,
            "optimizer": type(self._optimizer).__name__,
            "state": self.objects.kinds,
            "epochs": epochs,
        }


class Training:
    """The steps of one loop under the launcher.

    Attributes:
        loss: the last step's, None before the first.
        batch_spec: shapes and dtypes of a batch as plain data, None if not known.
    """

    def __init__(self, trained: Trained, session: Session) -> None:
        self._trained, self._session = trained, session
        self._search = Search(session)
        self._first = True
        self._said = False
        self.loss: tf.Tensor | None = None
        self.batch_spec: Any = None

    def begin(self) -> None:
        """The next batch of the loop is to be trained."""
        self._first = True

    def step(self, batch: Any) -> tf.Tensor:
        """One optimizer step over ``batch``; its loss.

        The first of a batch of the loop counts as the progress it makes. Others, of a
        loop that takes several, are just as safe, but what ran out of memory in one
        cannot be taken back to the batch's beginning.
        """
        session, data = self._session, slicing.as_tensors(batch)
        samples = slicing.batch_size(data)
        sharing = None
        if session.group is not None:
            sharing = self._trained.shared(data, session, session.group)
        step = self._trained.step(data, undoable=True)
        if self._first:
            self._check_batch_size(samples)
            session.announce(samples, data)
            session.before_step(None, samples)
            self._search.before_step(
                self._trained.objects, step, data, samples,
                lambda: self._may_cut(step, data), of_group=sharing is not None,
            )  # fmt: skip
        if self.batch_spec is None:
            self.batch_spec = batch_spec.to_plain(data)
        if sharing is not None:
            if not self._may_cut(step, data):
                raise RuntimeError(_NOT_CUT)
            sharing.agree(samples)
        while True:
            size = self._size(sharing, step, data, samples)
            began = time.perf_counter()
            try:
                if sharing is not None:
                    self.loss = sharing.step(data, samples, size)
                else:
                    self.loss = step.run(data, samples, size)
                break
            except tf.errors.ResourceExhaustedError as error:
                # Only its text is kept: its frames hold the failed step's tensors.
                message = str(error)
            self._exhausted(step, data, size, samples, message)
        self.loss = returning.aside(self.loss)
        session.micro_batches.ran(size)
        if self._first:
            session.step_done(samples, time.perf_counter() - began)
        self._first = False
        return self.loss

    def _size(
        self, sharing: Sharing | None, step: LossStep, data: Any, samples: int
    ) -> int:
        """Rows a pass."""
        if sharing is not None:
            return sharing.micro_batch_size(samples)
        size = self._session.micro_batches.size(samples)
        return samples if size < samples and not self._may_cut(step, data) else size

    def _check_batch_size(self, found: int) -> None:
        session = self._session
        wanted = session.launch.global_batch_size
        first = session.fit is not None and not session.fit.announced
        if first and wanted is not None and wanted != found:
            raise ValueError(
                f"batch.global is {wanted} in the job file, but the script's loop "
                f"trains batches of {found}: change one of the two"
            )

    def _may_cut(self, step: LossStep, data: Any) -> bool:
        """Whether batches can be cut exactly; says once what a person should know."""
        setting, objects = self._session.launch.batch_norm, self._trained.objects
        cut = step.cut(data)
        refused = setting == "refuse" and _has_batch_norm(objects)
        if not self._said:
            self._said = True
            for code, text in _caveats(objects, cut, setting):
                self._session.note(code, text)
        return cut.possible and not refused

    def _exhausted(
        self, step: LossStep, data: Any, size: int, samples: int, message: str
    ) -> None:
        """Returns where the step can be taken again, with a smaller micro-batch."""
        session = self._session
        applying = step.line.crossed
        undone = not applying and step.snapshot.possible
        if undone:
            step.snapshot.restore()
        phase = "apply" if applying else "gradients"
        if undone and self._first and size in session.micro_batches.measured:
            session.leave_if_leaking(size, phase, message)
        if samples > 1 and not self._may_cut(step, data):
            session.micro_batches.report(size, phase, message, recovery="none")
        elif session.micro_batches.shrink(size, samples, phase, message, safe=undone):
            return
        if undone and self._first:
            session.emergency_checkpoint()
        session.leave_for_restart()


def _has_batch_norm(objects: Objects) -> bool:
    kind = keras.layers.BatchNormalization
    return any(isinstance(layer, kind) for layer in objects.layers)


def _caveats(objects: Objects, cut: Cut, batch_norm: str) -> Iterator[tuple[str, str]]:
    """Notes, each with a code, on what micro-batches mean for a loop."""
    reason = "" if cut.possible else f"its loss function {cut.reason}"
    if batch_norm == "refuse" and _has_batch_norm(objects):
        reason = "it has BatchNormalization, and the job file says `batch_norm: refuse`"
    if reason:
        yield (
            "not-separable",
            "the batches of the loop are not cut into micro-batches, since it would "
            f"train another model: {reason}",
        )
        return
    if cut.found is Separability.UNKNOWN:
        yield (
            "random-loss",
            "the loss function of the loop draws random numbers in a way that cannot "
            "be followed, so it could not be tried whether a sample's value depends on "
            "other samples; it is taken not to",
        )
    if cut.metrics:
        yield (
            "metrics-of-micro-batches",
            f"{', '.join(cut.metrics)} of the loop is not a sum or a mean over "
            "samples: what it reports of a batch that was cut is that of its "
            "micro-batches. The weights are not concerned",
        )
    if batch_norm != "freeze" and _has_batch_norm(objects):
        yield (
            "batch-norm",
            "the loop trains BatchNormalization: its statistics are those of each "
            "micro-batch, so a step in micro-batches is not exactly that of the whole "
            "batch. LayerNormalization or GroupNormalization would not depend on it",
        )
    if cut.draws:
        yield (
            "random-layers",
            "the loop draws random numbers (Dropout, noise): each micro-batch draws "
            "its own, so a step in micro-batches has others than the whole batch, of "
            "the same kind",
        )
