"""The real engine around a ``fit`` in this process, and off again.

Covers: a session whose events go over a real socket, oomrun's hooks on Keras put in
and taken out, the micro-batch of each phase, what was really cut. Does not cover:
running out of memory and restarts (``tests/e2e``).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer as keras_trainer

from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.launch import Launch
from oomrun.core.plan import DevicePlan, Plan
from oomrun.worker import keras_adapter
from oomrun.worker.channel import Channel
from oomrun.worker.recovery import MicroBatches
from oomrun.worker.session import Session

__all__ = ["Engine", "Ran"]

# Wherever a hook may be put.
_OWNERS: tuple[Any, ...] = (
    keras_trainer,
    keras_trainer.TensorFlowTrainer,
    keras_trainer.base_trainer.Trainer,
    keras.Model,
)


@dataclass(frozen=True)
class Ran:
    """One batch that went through the engine: its samples, and those of a pass."""

    phase: str
    samples: int
    size: int

    @property
    def cut(self) -> bool:
        """Whether it took more than one pass."""
        return self.size < self.samples


class _Bounded(MicroBatches):
    """Sizes with bounds that a test sets; tells what ran."""

    def __init__(self, launch: Launch, channel: Channel) -> None:
        super().__init__(launch, channel)
        self.bounds: dict[str, int | None] = {}
        self.log: list[Ran] = []
        self._samples: dict[str, int] = {}

    def size(self, samples: int, phase: str = "gradients") -> int:
        self._samples[phase] = samples
        size = super().size(samples, phase)
        bound = self.bounds.get(phase)
        return size if bound is None else min(size, bound)

    def ran(self, size: int, phase: str = "gradients") -> None:
        super().ran(size, phase)
        self.log.append(Ran(phase, self._samples[phase], size))


class Engine:
    """Keras with and without oomrun's hooks, in one process.

    Args:
        folder: where the session keeps its checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        ours, self._theirs = socket.socketpair()
        self._read = bytearray()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        self._channel = Channel(ours.detach())
        plain = _hooks()
        self.session = Session(_launch(folder), self._channel)
        self._sizes = _Bounded(self.session.launch, self._channel)
        self.session.micro_batches = self._sizes
        keras_adapter.install(self.session)
        hooked = _hooks()
        self._plain, self._engine = [], []
        for before, after in zip(plain, hooked, strict=True):
            changed = [name for name in after if after[name] is not before.get(name)]
            self._plain.append({name: before.get(name) for name in changed})
            self._engine.append({name: after[name] for name in changed})
        _use(self._plain)

    def _drain(self) -> None:
        while read := self._theirs.recv(65536):
            self._read += read

    @contextmanager
    def on(self, gradients: int | None, evaluate: int | None = None) -> Iterator[None]:
        """The engine in place, with at most so many samples a pass of each phase."""
        self.bound(gradients, evaluate)
        _use(self._engine)
        try:
            yield
        finally:
            _use(self._plain)

    def bound(self, gradients: int | None, evaluate: int | None = None) -> None:
        """At most so many samples a pass from now on; None: as many as there are."""
        self._sizes.bounds = {"gradients": gradients, "evaluate": evaluate}

    @property
    def ran(self) -> list[Ran]:
        """Every pass size that worked, in order."""
        return self._sizes.log

    def close(self) -> list[ev.Event]:
        """Ends the session; the events that it has sent."""
        self.session.store.wait()
        self._channel.close()
        self._reader.join()
        self._theirs.close()
        # A worker leaves this to the end of its process.
        self._channel._socket.close()
        return [
            event_json.from_json(json.loads(line)) for line in self._read.splitlines()
        ]


def _hooks() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in _OWNERS]


def _use(hooks: list[dict[str, Any]]) -> None:
    for owner, named in zip(_OWNERS, hooks, strict=True):
        for name, value in named.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _launch(folder: Path) -> Launch:
    device = DevicePlan(id="cpu:0", kind="cpu", limit_bytes=None, budget_bytes=None)
    plan = Plan(
        strategy="single",
        strategy_reason="",
        global_batch_size=None,
        memory_mode="growth",
        devices=(device,),
    )
    return Launch(
        attempt=1,
        rank=0,
        plan=plan,
        program_kind="script",
        program="",
        args=(),
        run_id="test",
        seed=0,
        checkpoint_dir=str(folder),
        checkpoint_every_steps=None,
        checkpoint_every_s=None,
        keep=1,
        in_process=True,
        micro_batch_max=None,
        micro_batch_fixed=None,
        global_batch_size=None,
        last_step=0,
    )
