"""Keras's train function in our hands: a batch, a step, and what if it does not fit.

Covers: pulling batches, taking a step with the engine, undoing one that ran out of
memory and taking it again. Does not cover: the step (``engine``), the micro-batch that
is tried next (``recovery.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oomrun.worker import (
    announcing,
    building,
    caveats,
    checkpointing,
    measuring,
    position,
)
from oomrun.worker.engine import returning, slicing, step
from oomrun.worker.engine.separability import Separability
from oomrun.worker.engine.shared_step import SharedStep
from oomrun.worker.fit_call import FitCall
from oomrun.worker.mirroring import Mirroring
from oomrun.worker.read_ahead import Ahead
from oomrun.worker.recovery import MicroBatches
from oomrun.worker.searching import Search
from oomrun.worker.session import Session
from oomrun.worker.sharing import Sharing

__all__ = ["TrainFunction"]

_NESTED_DATA = (
    "data-not-repeated",
    "a callback calls fit within a fit, on a tf.data.Dataset with a shuffle: after a "
    "restart such a dataset begins with its first order again, whatever it had come to "
    "before. One that is made anew for each of these calls, or arrays, give the same "
    "batches as without the restart",
)


def _loss(logs: Any) -> Any:
    return logs.get("loss") if isinstance(logs, dict) else None


_BATCH_NORM_REFUSED = step.Cut(
    Separability.NONE,
    "it has BatchNormalization, and the job file says `batch_norm: refuse`",
)


class TrainFunction:
    """Takes Keras's place in pulling batches and training on them.

    Args:
        session: the training it is part of.
        model: compiled.
        make_original: makes Keras's own train function for the model.
    """

    def __init__(
        self, session: Session, model: Any, make_original: Callable[[], Any]
    ) -> None:
        self._session, self._model = session, model
        self._make_original = make_original
        self._original: Any = None
        self._function: step.StepFunction | None = None
        self._sharing: Sharing | Mirroring | None = None
        self._said = False
        self._search = Search(session)
        self._ahead = Ahead()

    def __call__(self, iterator: Any) -> Any:
        logs = None
        steps = range(self._model.steps_per_execution)
        call = self._fit_of(iterator)
        if call is not None:
            steps = call.iterator.steps_due()
        for _ in steps:
            try:
                data = self._next(iterator, call)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    self._end_of_data(iterator)
                    raise StopIteration from None
                break
            logs = returning.aside(self._step(data, in_fit=call is not None))
            del data  # before the next one is read
        return logs

    def _fit_of(self, iterator: Any) -> FitCall | None:
        """The script's ``fit`` if these are its batches.

        They are not in a ``train_on_batch``, nor in a ``fit`` that a callback calls
        within another, not even where it trains the same model: such steps are no part
        of the data that the position counts.
        """
        call = self._session.fit
        if call is None or call.model is not self._model or call.iterator is None:
            return None
        if call.iterator.gives(iterator):
            return call
        if self._session.launch.attempt > 1 and position.goes_on(iterator):
            self._session.note(*_NESTED_DATA)
        return None

    def _next(self, iterator: Any, call: FitCall | None) -> Any:
        """The next batch, once those that are read ahead of it lie in their places."""
        if call is None or not call.waits_for_data:
            return slicing.as_tensors(next(iterator))
        self._session.let_batch_go()
        self._ahead.before_batch(call)
        data = slicing.as_tensors(next(iterator))
        self._ahead.wait(call, slicing.bytes_of(data))
        return data

    def _end_of_data(self, iterator: Any) -> None:
        """What Keras does where it finds out that the data has ended.

        It pulls the batch inside the graph of the step. Whatever of a step needs no
        data is done before that fails: one more count of the optimizer, a seed drawn.
        So each epoch of unknown length has such a step more, in plain Keras and here.
        """
        if self._model.run_eagerly or not isinstance(iterator, tf.data.Iterator):
            return
        if self._original is None:
            self._original = self._make_original()
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            self._original(iterator)

    def _step(self, data: Any, *, in_fit: bool) -> Any:
        session = self._session
        if self._function is None:
            building.from_batch(self._model, data)
            self._restore_pending()
            self._function = self._step_function()
            self._function.trace_for(self._spec(data))
            for note in caveats.of_variables(self._model):
                self._session.note(*note)
            announcing.optimizer_replaced(self._session, self._model)
        samples = slicing.batch_size(data)
        if in_fit:
            session.before_step(data, samples)
            self._search.before_step(
                self._model,
                self._function,
                data,
                samples,
                lambda: self._may_cut(data),
                of_group=self._sharing is not None,
            )
        elif session.launch.measure and session.fit is None:
            measuring.leave_unmeasured(session, "train_on_batch is called")
        if self._sharing is not None:
            self._share(self._sharing, data, samples)
        while True:
            began = time.perf_counter()
            size = self._size(data, samples)
            try:
                if self._sharing is not None:
                    logs = self._sharing.step(data, samples, size)
                else:
                    logs = self._function.run(data, samples, size)
                break
            except tf.errors.ResourceExhaustedError as error:
                # Only its text is kept: its frames hold the failed step's tensors.
                message = str(error)
            for sizes, failed, text in self._blamed(size, message):
                self._exhausted(data, sizes, failed, samples, text, in_fit=in_fit)
        session.micro_batches.ran(size)
        seconds = time.perf_counter() - began
        if in_fit:
            session.step_done(samples, seconds)
        elif session.fit is None:
            session.lone_step(samples, seconds, _loss(logs))
        return logs

    def _step_function(self) -> step.StepFunction:
        session = self._session
        if session.group is not None:
            function = SharedStep(self._model, session.group)
            self._sharing = sharing = Sharing(session, session.group, function)
            sharing.begin([*self._model.variables, *self._model.optimizer.variables])
            return function
        if len(session.launch.plan.devices) > 1:
            self._sharing = Mirroring(session, self._model, self._search)
            return self._sharing.function
        return step.StepFunction(self._model)

    def _share(self, sharing: Sharing | Mirroring, data: Any, samples: int) -> None:
        """Before a step that is taken by all workers of a group, or all devices."""
        if not self._may_cut(data):
            if isinstance(sharing, Mirroring):
                self._sharing = None
                self._session.note(*caveats.of_one_device(self._model.name))
                return
            raise RuntimeError(
                f"oomrun cannot share the batches of {self._model.name} out over "
                "several devices: they cannot be cut into parts, and the run's notes "
                "say why. Write `strategy: single` in the job file"
            )
        sharing.agree(samples)

    def _size(self, data: Any, samples: int) -> int:
        """Rows a pass."""
        if self._sharing is not None:
            return self._sharing.micro_batch_size(samples)
        size = self._session.micro_batches.size(samples)
        return samples if size < samples and not self._may_cut(data) else size

    def _spec(self, data: Any) -> Any:
        """Shapes and dtypes of this fit's batches; None where it is not in one."""
        call = self._session.fit
        if call is None or call.model is not self._model or call.iterator is None:
            return None
        return slicing.spec_alike(call.iterator.element_spec, data)

    def _restore_pending(self) -> None:
        call = self._session.fit
        if call is not None and call.model is self._model and call.pending is not None:
            state, arrays = call.pending
            note = self._session.note
            checkpointing.restore(self._model, state, arrays, note, whole=True)
            call.pending = None

    def _may_cut(self, data: Any) -> bool:
        """Whether batches can be cut exactly; says once what a person should know."""
        assert self._function is not None
        batch_norm = self._session.launch.batch_norm
        if batch_norm == "refuse" and caveats.has_batch_norm(self._model):
            found = _BATCH_NORM_REFUSED
        else:
            found = self._function.cut(data)
        if not self._said:
            self._said = True
            for code, text in caveats.of_a_cut(self._model, found, batch_norm):
                self._session.note(code, text)
        return found.possible

    def _blamed(self, size: int, message: str) -> list[tuple[MicroBatches, int, str]]:
        """Whose memory ran out, at which size, and TensorFlow's text."""
        if isinstance(self._sharing, Mirroring):
            return self._sharing.blamed(message)
        return [(self._session.micro_batches, size, message)]

    def _exhausted(
        self,
        data: Any,
        sizes: MicroBatches,
        size: int,
        samples: int,
        message: str,
        *,
        in_fit: bool,
    ) -> None:
        """Returns where the step can be taken again, with a smaller micro-batch."""
        assert self._function is not None
        session, function = self._session, self._function
        applying = function.applying
        undone = not applying and function.snapshot.possible
        # What a callback had begun would not be done again after a checkpoint of now.
        saves = undone and (in_fit or session.fit is None)
        if undone:
            function.snapshot.restore()
        phase = "apply" if function.at_last_optimizer else "gradients"
        if sizes is session.micro_batches and saves and size in sizes.measured:
            session.leave_if_leaking(size, phase, message)
        if samples > 1 and not function.lost and not self._may_cut(data):
            sizes.report(size, phase, message, recovery="none")
        elif sizes.shrink(size, samples, phase, message, safe=undone):
            return
        if saves:
            session.emergency_checkpoint()
        session.leave_for_restart()
