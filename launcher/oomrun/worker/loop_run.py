"""Running a custom loop: alone as the script stands, or followed by the session.

Covers: where the loop is and going back there after a restart, what is saved of it.
Does not cover: the order in which a script may call what (``loop.py``), running out of
memory in a step (``loop_training.py``), the step itself (``engine``).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from oomrun.worker import batch_spec, checkpointing, position, randomness
from oomrun.worker.encoding import Arrays
from oomrun.worker.engine import slicing
from oomrun.worker.fit_call import FitCall
from oomrun.worker.loop_training import Trained, Training
from oomrun.worker.session import Session
from oomrun.worker.sources import Sources, step_over

__all__ = ["Alone", "Followed", "LoopRun"]


class LoopRun(Protocol):
    """The course of a loop."""

    def epochs(self, count: int) -> Iterable[int]:
        """The epochs to train."""

    def batches(self, source: Any, most: int | None) -> Iterable[Any]:
        """The batches to train; each is done when the next one is asked for."""

    def step(self, batch: Any) -> tf.Tensor:
        """One optimizer step; the loss of the whole batch."""

    def epoch_ended(self) -> None:
        """The script is done with an epoch."""

    def ended(self) -> None:
        """The script is done with all epochs."""

    def left(self) -> None:
        """The script has left the loop before its end."""


class Alone:
    """Without oomrun's launcher: whole batches, and nothing is kept."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def epochs(self, count: int) -> Iterable[int]:
        """All of them."""
        return range(count)

    def batches(self, source: Any, most: int | None) -> Iterable[Any]:
        """The source as it is."""
        return itertools.islice(source, most)

    def step(self, batch: Any) -> tf.Tensor:
        """One step over the whole batch."""
        data = slicing.as_tensors(batch)
        samples = slicing.batch_size(data)
        return self._trained.step(data, undoable=False).run(data, samples, samples)

    def epoch_ended(self) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """Nothing to do."""

    def left(self) -> None:
        """Nothing to do."""


@dataclass
class _Data:
    """What is told of a loop's data when it begins, in the place of an iterator."""

    num_batches: int | None = None
    batch_size: int | None = None


class Followed:
    """Under the launcher.

    The position is: the epoch, which of its ``batches`` loops, and how many batches of
    that are done. What a script does in an epoch before that loop, it does once more
    when it resumes: from the random state that the epoch began with. Then everything
    is put to where it was at the checkpoint.
    """

    def __init__(self, trained: Trained, session: Session) -> None:
        self._trained, self._session = trained, session
        self._training = Training(trained, session)
        self._sources = Sources()
        self._call: FitCall | None = None
        self._resumed: tuple[dict[str, Any], Arrays] | None = None
        self._random: dict[str, Any] = {}
        self._last: Any = None  # the batch done last
        self._phase = -1  # which ``batches`` loop of the epoch, -1 before the first
        # What had been taken from each phase's source where a restart meets it: as the
        # position stands now, and as it will in the next epoch.
        self._taken: list[list[int]] = []
        self._taken_next: list[list[int]] = []

    # -- epochs ----------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Those that are not done yet."""
        session, trained = self._session, self._trained
        call = session.begin_fit(trained.objects, trained.fingerprint(count), count)
        saved, call.saved = call.saved, None
        if saved is not None and saved[0]["result"] is not None:
            self._restore(*saved)
            randomness.restore(saved[0]["random"])
            session.replayed(call, saved[0])
            return
        self._call, call.key = call, trained.key
        session.fit = call
        call.loop, call.iterator = self._state, _Data()
        self._taken, self._taken_next, self._resumed = [], [], None
        if saved is not None:
            self._resume(call, saved)
        for epoch in range(call.epoch, count):
            if self._resumed is None:
                call.epoch, call.batches = epoch, 0
            self._phase, self._random = -1, randomness.save()
            yield epoch

    def epoch_ended(self) -> None:
        """A good moment to save or stop, if the last batch was none."""
        assert self._call is not None
        self._resumed, self._phase, self._last = None, -1, None
        self._taken = list(self._taken_next)
        if self._call.epoch + 1 < self._call.epochs:
            self._session.epoch_ended(self._training.loss)

    def ended(self) -> None:
        """Keeps the result."""
        call, self._call = self._call, None
        if call is not None:
            call.epoch = call.epochs - 1
            self._session.end_loop(call)

    def left(self) -> None:
        """Keeps the result, as far as it is one."""
        call, self._call = self._call, None
        if call is not None:
            self._session.leave_loop(call)

    # -- batches ---------------------------------------------------------------

    def batches(self, source: Any, most: int | None) -> Iterator[Any]:
        """Those that are not done yet."""
        call, session = self._call, self._session
        assert call is not None
        self._phase += 1
        call.iterator.num_batches = _length(source, most)
        done = self._enter(source)
        iterator = self._sources.iterate(source)
        try:
            if done is None:
                return
            self._step_over(iterator, done)
            for batch in itertools.islice(iterator, most and max(0, most - done)):
                self._training.begin()
                yield batch
                done += 1
                self._last, call.batches = batch, done
                session.batch_ended(self._training.loss)
        finally:
            self._leave(source, iterated=done is not None)

    def step(self, batch: Any) -> tf.Tensor:
        """One step, in as many passes as memory asks for."""
        return self._training.step(batch)

    def _enter(self, source: Any) -> int | None:
        """Batches of ``source`` that are done already; None if they all are."""
        assert self._call is not None
        at = self._phase
        if at < len(self._taken):
            # Only a restart leaves a source behind; catching up may draw numbers.
            random = randomness.save()
            self._sources.catch_up(source, self._taken[at])
            randomness.restore(random)
        if self._resumed is None:
            self._call.batches, self._last = 0, None
            _put(self._taken, at, self._sources.taken(source))
            return 0
        state, _ = self._resumed
        return None if at < state["loop"]["phase"] else int(state["batches"])

    def _step_over(self, iterator: Iterator[Any], done: int) -> None:
        """Passes the batches that were trained, and goes on from there."""
        if self._resumed is None:
            return
        state, arrays = self._resumed
        self._last, self._resumed = step_over(iterator, done), None
        if self._fingerprint() != state["loop"]["data"]:
            self._session.note(*_NOT_REPEATED)
        self._restore(state, arrays)
        randomness.restore(state["random"])

    def _leave(self, source: Any, *, iterated: bool) -> None:
        if self._call is None:
            return
        taken = self._sources.taken(source)
        if iterated:
            _put(self._taken, self._phase, taken)
        # A source of this epoch alone will be another one in the next.
        once = len(taken) == 1 and self._call.epoch > 0
        _put(self._taken_next, self._phase, [] if once else taken)

    # -- saving and going on ---------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "phase": self._phase,
            "taken": self._taken,
            "random": self._random,
            "values": dict(self._trained.values),
            "batch": self._training.batch_spec,
            "data": self._fingerprint(),
        }

    def _fingerprint(self) -> str:
        """Of the batch done last, empty if there is none to be had."""
        if self._last is None:
            return ""
        try:
            return position.fingerprint(slicing.as_tensors(self._last))
        except (TypeError, ValueError):
            return ""  # a batch of what TensorFlow does not know

    def _resume(self, call: FitCall, saved: tuple[dict[str, Any], Arrays]) -> None:
        state, arrays = saved
        loop = state["loop"]
        self._session.restored(call, state)
        self._restore(state, arrays)
        self._taken = loop["taken"]
        if loop["phase"] < 0:  # saved between two epochs
            randomness.restore(state["random"])
        else:
            self._resumed = saved
            randomness.restore(loop["random"])

    def _restore(self, state: dict[str, Any], arrays: Arrays) -> None:
        trained, loop = self._trained, state["loop"]
        objects, batch = trained.objects, loop["batch"]
        saved = checkpointing.saved_variables(arrays)
        if batch is not None and len(objects.variables) != saved:
            objects.build(trained.loss, batch_spec.from_plain(batch))
        checkpointing.restore_variables(objects.variables, arrays)
        trained.values.clear()
        trained.values.update(copy.deepcopy(loop["values"]))


def _put(entries: list[list[int]], index: int, value: list[int]) -> None:
    del entries[len(entries) :]
    while len(entries) <= index:
        entries.append([])
    entries[index] = value


def _length(source: Any, most: int | None) -> int | None:
    length: int | None = None
    if isinstance(source, tf.data.Dataset):
        cardinality = int(source.cardinality())
        length = cardinality if cardinality >= 0 else None
    elif hasattr(source, "__len__"):
        length = len(source)
    bounds = [bound for bound in (length, most) if bound is not None]
    return min(bounds) if bounds else None


_NOT_REPEATED = (
    "data-not-repeated",
    "the source of the loop's batches did not give the batches again that it gave "
    "before the restart: some samples of this epoch may be trained twice and others "
    "not at all. A seed in the script's shuffle makes it repeatable; a generator must "
    "give the same batches each time it is begun",
)
