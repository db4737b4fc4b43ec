"""Following a ``fit`` from within: a callback of ours, last among the script's own.

Covers: putting it in and taking it out again, restoring at the right hook, reporting
batches, saving, stopping. Does not cover: the functions that Keras trains by
(``keras_adapter.py``).
"""

from __future__ import annotations

import time
from typing import Any

import keras

from oomrun.worker import building, callback_state, checkpointing, randomness, scalars
from oomrun.worker.fit_call import FitCall
from oomrun.worker.position import Position
from oomrun.worker.session import Session

__all__ = ["listed", "with_ours", "without_ours"]


def with_ours(session: Session, call: FitCall, callbacks: Any) -> Any:
    """The callbacks given to ``fit``, in the same form, with one of ours behind."""
    ours = _EngineCallback(session, call)
    call.callbacks = listed(callbacks)
    scalars.follow(session, call.callbacks)
    if call.saved is not None:
        callback_state.prepare_to_resume(call.callbacks)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.append(ours)
        ours.set_model(call.model)
        # Chosen without ours; in another thread it would see the step after its own.
        callbacks._async_train = callbacks._async_test = False
        return callbacks
    return [*call.callbacks, ours]


def without_ours(callbacks: Any) -> None:
    """The script's own list may be given to its next ``fit`` too."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = [
            callback
            for callback in callbacks.callbacks
            if not isinstance(callback, _EngineCallback)
        ]


def listed(callbacks: Any) -> list[Any]:
    """The callbacks in whatever form ``fit`` was given them."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return [
            callback
            for callback in callbacks.callbacks
            if not isinstance(callback, keras.callbacks.ProgbarLogger)
        ]
    return keras.tree.flatten(callbacks)  # type: ignore[no-any-return]


class _EngineCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Follows ``fit`` through its hooks: restores, reports, saves, stops."""

    def __init__(self, session: Session, call: FitCall) -> None:
        super().__init__()
        self._session, self._call = session, call
        self._restored = call.saved is None
        self._random: dict[str, Any] | None = None
        self._began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        call = self._call
        history = getattr(call.model, "history", None)
        if history is not None and history not in call.callbacks:
            call.callbacks.append(history)
        if call.iterator is not None:
            building.from_spec(call.model, call.iterator.element_spec)
        call.epoch = call.initial_epoch
        if call.saved is None:
            return
        state, _ = call.saved
        # Keras begins here; BackupAndRestore uses the same entrance.
        call.model._initial_epoch = state["epoch"]
        self._session.restored(call, state)
        call.iterator.arrived = self._restore_random
        call.iterator.enter_at(
            Position(
                epochs=state["epoch"] - state["initial_epoch"],
                batches=state["batches"],
                fingerprint=state["data"],
            )
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        call = self._call
        if self._restored:
            call.epoch, call.batches, call.entered = epoch, 0, None
            return
        # Read by now; left there, the model's next ``fit`` would begin here too.
        call.model._initial_epoch = None
        # Last of all hooks: what the others have set for this epoch was set before
        # the checkpoint was written, and is in it.
        assert call.saved is not None
        state, arrays = call.saved
        if not checkpointing.restore(call.model, state, arrays, self._session.note):
            # For the first batch, which completes the model.
            call.pending = state, arrays
        callback_state.restore(call.callbacks, state["callbacks"])
        self._random = state["random"]
        self._restored = True
        call.saved = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._restore_random()
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._call.managed:
            self._count_unmanaged()
        self._session.batch_ended((logs or {}).get("loss"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._restore_random()

    def on_test_begin(self, logs: Any = None) -> None:
        self._session.phase("evaluating")

    def on_test_end(self, logs: Any = None) -> None:
        self._session.phase("training")

    def _restore_random(self) -> None:
        """Once the data is at its position: getting there draws random numbers."""
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None
            if self._call.iterator.repeats is False:
                self._session.note(
                    "data-not-repeated",
                    "the data pipeline did not give the batches again that it gave "
                    "before the restart: some samples of this epoch may be trained "
                    "twice and others not at all. A seed in the script's shuffle "
                    "makes it repeatable; a generator or PyDataset must give the same "
                    "batches each time it is begun",
                )

    def _count_unmanaged(self) -> None:
        """Counts the steps of an execution that was not ours."""
        session, call = self._session, self._call
        seconds = time.perf_counter() - self._began
        steps = call.model.steps_per_execution
        if call.iterator.num_batches:
            steps = min(steps, call.iterator.num_batches - call.batches)
        for _ in range(steps):
            size = call.iterator.rows_of_batch(call.batches)
            session.announce(size)
            session.due_after_step()
            session.step_done(size, seconds / steps)
