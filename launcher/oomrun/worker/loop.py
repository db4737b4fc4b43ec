"""``oomrun.Loop``: a custom training loop with the engine of ``fit``.

Covers: the loop as a script writes it, and the order in which it may call what. Does
not cover: what is done under the launcher (``loop_run.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from oomrun.worker import caveats, current
from oomrun.worker.engine.objects import Objects
from oomrun.worker.loop_run import Alone, Followed, LoopRun
from oomrun.worker.loop_training import Trained
from oomrun.worker.values import Values

__all__ = ["Device", "Loop"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that the loop trains on; ``limit_bytes`` is None without a limit."""

    name: str
    limit_bytes: int | None


class Loop:
    """A training loop of the script's own.

    Example::

        loop = oomrun.Loop(loss, optimizer, state=[model, accuracy])
        for epoch in loop.epochs(5):
            for batch in loop.batches(dataset):
                value = loop.step(batch)
            print(epoch, float(value), float(accuracy.result()))
            accuracy.reset_state()

    Under ``oomrun job.yaml`` a step that does not fit into memory is undone and taken
    in micro-batches with the same result, checkpoints are written after batches, and a
    restarted script goes on after the last trained batch of the last one. Under plain
    ``python`` the loop does what it says, and nothing else.

    Args:
        loss: gives the loss of a batch, or of any part of one: a value for each sample,
            whose mean is meant, or one scalar.
        optimizer: a Keras optimizer.
        state: everything else that the loop changes and a restart has to find again:
            models, layers, metrics, variables, random generators, in any nesting.
        variables: what to train: variables, or layers whose trainable variables are
            meant. The default is all layers and models in ``state``.

    Attributes:
        values: plain values of the loop's own, such as the best loss so far; saved and
            restored with the rest. To be changed after ``step``, not before.
    """

    _running: Loop | None = None

    def __init__(
        self,
        loss: Callable[[Any], Any],
        optimizer: Any,
        state: Any = (),
        variables: Any = None,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"oomrun.Loop: loss must be a function, not {loss!r}")
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"oomrun.Loop: optimizer must be a Keras optimizer, not {optimizer!r}"
            )
        trained = Trained(loss, optimizer, Objects(state, optimizer, variables))
        self.values: Values = trained.values
        self._session = current.session()
        if self._session is not None and self._session.several_devices:
            self._session.note(*caveats.of_one_device("oomrun.Loop"))
        self._run: LoopRun = (
            Alone(trained)
            if self._session is None
            else Followed(trained, self._session)
        )
        self._in_epoch = self._in_batches = self._in_batch = False

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that the script runs under: TensorFlow's default one, so far."""
        return tf.distribute.get_strategy()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the loop trains on, by TensorFlow's names."""
        found = tf.config.list_logical_devices("GPU")
        found = found or tf.config.list_logical_devices("CPU")
        if self._session is None:
            return tuple(Device(device.name, None) for device in found)
        planned = self._session.launch.plan.devices[:1]
        return tuple(
            Device(device.name, plan.limit_bytes)
            for device, plan in zip(found, planned, strict=False)
        )

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs to train, from 0 to below ``count``.

        Each call is a training of its own, as a call of ``fit`` is. After a restart it
        begins with the epoch that was interrupted, and gives none if it was completed
        before; the objects and ``values`` are then as they were at its end. Breaking
        out of it completes it.

        Raises:
            RuntimeError: a loop or a ``fit`` is running.
        """
        if count < 0:
            raise ValueError(f"loop.epochs: {count} epochs cannot be trained")
        return self._epochs(count)

    def _epochs(self, count: int) -> Iterator[int]:
        if Loop._running is not None:
            _misused("loop.epochs() within another loop: end that one first")
        if self._session is not None and self._session.fit is not None:
            _misused("loop.epochs() within fit: a loop cannot run inside of it")
        Loop._running = self
        try:
            for epoch in self._run.epochs(count):
                self._in_epoch = True
                yield epoch
                self._in_epoch = False
                self._run.epoch_ended()
            self._run.ended()
        except GeneratorExit:
            self._run.left()
            raise
        finally:
            self._in_epoch = False
            Loop._running = None

    def batches(self, source: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """The batches of one pass over ``source`` that are still to be trained.

        Args:
            source: a ``tf.data.Dataset``, or anything else that can be iterated.
            steps: at most so many batches.

        Raises:
            RuntimeError: called outside of an epoch, or within another ``batches``.
        """
        if not self._in_epoch:
            _misused(
                "loop.batches() outside of loop.epochs(): write it in the body of "
                "`for epoch in loop.epochs(1):`"
            )
        return self._batches(source, steps)

    def _batches(self, source: Iterable[Any], steps: int | None) -> Iterator[Any]:
        if self._in_batches:
            _misused("loop.batches() within loop.batches(): end the inner one first")
        if not self._in_epoch:
            _misused("loop.batches() is iterated after its epoch has ended")
        self._in_batches = True
        try:
            for batch in self._run.batches(source, steps):
                self._in_batch = True
                yield batch
                self._in_batch = False
        finally:
            self._in_batches = self._in_batch = False

    def step(self, batch: Any) -> tf.Tensor:
        """One optimizer step over ``batch``, cut as memory asks for.

        Args:
            batch: nested tensors or arrays whose first axis is the samples'.

        Returns:
            The loss of the whole batch, a scalar.

        Raises:
            RuntimeError: called outside of ``batches``.
        """
        if not self._in_batch:
            _misused(
                "loop.step() outside of loop.batches(): write it in the body of "
                "`for batch in loop.batches(dataset):`"
            )
        return self._run.step(batch)


def _misused(text: str) -> NoReturn:
    raise RuntimeError(f"oomrun.Loop: {text}")
