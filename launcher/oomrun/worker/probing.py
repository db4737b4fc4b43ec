"""Finding the micro-batch before the first step, by trying what is likely to fit.

Covers: a few passes of the real step at growing sizes, on the real first batch, with
their peaks; everything they change is put back, so that the numbers that are trained
are those of a run that tried nothing. Which size is tried is decided by
``oomrun.core.probing``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from oomrun.core import events as ev
from oomrun.core import probing
from oomrun.core.memory import MemoryModel
from oomrun.worker import checkpointing, devices
from oomrun.worker.engine import keeping, slicing
from oomrun.worker.engine.step import StepFunction
from oomrun.worker.session import Session

__all__ = ["Prober"]

TRIALS = 3
_STEPS, _PASSES = 3, 2


class Prober:
    """Looks for the micro-batch of one model.

    Args:
        session: the training it is part of.
        model: built and compiled.
        function: its step.
    """

    def __init__(self, session: Session, model: Any, function: StepFunction) -> None:
        self._session, self._model, self._function = session, model, function
        self._plan = session.launch.plan

    def settle(
        self, data: Any, samples: int, may_cut: Callable[[], bool]
    ) -> tuple[probing.Settled | probing.NothingFits, MemoryModel] | None:
        """Tries sizes on ``data`` until one is found to train with.

        Args:
            data: an eager batch.
            samples: its rows.
            may_cut: whether batches can be cut; asked only if they may have to be.

        Returns:
            What was found, and what is known then; None where it is the whole batch
            anyway.
        """
        sizes = self._session.micro_batches
        measured, failed = sizes.known(checkpointing.state_bytes(self._model))
        static = {}
        if not measured:
            some = sorted({max(1, samples // 8), samples})
            static = self._function.static_peaks(data, some)
        rest, trials = self._at_rest_bytes(), TRIALS
        while True:
            known = MemoryModel(state_bytes=rest, measured=measured, static=static)
            asked = probing.Asked(
                samples=samples,
                at_most=sizes.size(samples),
                budget_bytes=sizes.budget_bytes,
                trials_left=trials,
                failed=failed,
            )
            step = probing.next_step(known, asked)
            if not isinstance(step, probing.Try):
                return step, known
            if trials == TRIALS and not may_cut():
                return None
            trials -= 1
            peak = self._try(data, samples, step.size)
            if peak is None:
                failed = min(step.size, failed or step.size)
            else:
                measured = {**measured, step.size: peak}

    def _at_rest_bytes(self) -> int:
        """In use before a step, with the gradients that every step holds."""
        (memory,) = devices.read_memory(self._plan)
        gradients: int = sum(
            v.value.shape.num_elements() * v.value.dtype.size
            for v in self._model.trainable_variables
        )
        return (memory.in_use_bytes or 0) + gradients

    def _try(self, data: Any, samples: int, size: int) -> int | None:
        """The peak of a few steps at ``size``; None where it ran out of memory."""
        rows = samples if size >= samples else min(samples, _PASSES * size)
        few = data if rows == samples else slicing.cut(data, 0, rows)
        began, message = time.perf_counter(), ""
        devices.reset_peaks(self._plan)
        with keeping.left_as_it_was(keeping.variables_of(self._model)):
            try:
                for _ in range(_STEPS):
                    _wait_for(self._function.run(few, rows, min(size, rows)))
            except tf.errors.ResourceExhaustedError as error:
                message = str(error)
        (memory,) = devices.read_memory(self._plan)
        devices.reset_peaks(self._plan)
        peak = None if message else memory.peak_bytes
        call = self._session.fit
        self._session.channel.send(
            ev.Probed(
                at=time.time(),
                attempt=self._session.launch.attempt,
                fit=call.number if call else 0,
                micro_batch_size=size,
                steps=_STEPS,
                peak_bytes=peak,
                seconds=time.perf_counter() - began,
                message=message[:500],
            )
        )
        return peak


def _wait_for(logs: Any) -> None:
    """An accelerator may still be at work when a step has returned."""
    for value in tf.nest.flatten(logs):
        if isinstance(value, tf.Tensor):
            value.numpy()
