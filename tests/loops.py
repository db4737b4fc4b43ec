"""What tests of custom loops share: a worker's session in this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.launch import Launch
from oomrun.core.plan import DevicePlan, Plan
from oomrun.worker import current
from oomrun.worker.channel import Channel
from oomrun.worker.session import Session

__all__ = ["alone", "variables", "worker"]


def variables(thing: Any) -> list[Any]:
    """An object's variables, by the names that TensorFlow and Keras give them."""
    if isinstance(thing, tf.Variable):
        return [thing]
    if isinstance(thing, tf.random.Generator | keras.random.SeedGenerator):
        return [thing.state]
    return list(thing.variables)


@contextlib.contextmanager
def alone() -> Iterator[list[ev.Event]]:
    """As without oomrun's launcher."""
    yield []


@contextlib.contextmanager
def worker(
    folder: Path, *, attempt: int = 1, **launch: Any
) -> Iterator[list[ev.Event]]:
    """As in a worker whose checkpoints are in ``folder``; its events, once it ended.

    A block that raises is a script that dies: what is not written then is lost.
    """
    ours, theirs = socket.socketpair()
    read = bytearray()

    def drain() -> None:
        while received := theirs.recv(65536):
            read.extend(received)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    channel = Channel(ours.detach())
    session = Session(_launch(folder, attempt, launch), channel)
    current.register(session)
    events: list[ev.Event] = []
    try:
        yield events
        session.settle()
    finally:
        current.register(None)
        session.store.wait()
        channel.close()
        reader.join()
        theirs.close()
        channel._socket.close()
        events += [event_json.from_json(json.loads(line)) for line in read.splitlines()]


def _launch(folder: Path, attempt: int, given: dict[str, Any]) -> Launch:
    device = DevicePlan(id="cpu:0", kind="cpu", limit_bytes=None, budget_bytes=None)
    plan = Plan(
        strategy="single",
        strategy_reason="",
        global_batch_size=None,
        memory_mode="growth",
        devices=(device,),
    )
    settings: dict[str, Any] = {
        "checkpoint_every_steps": None,
        "micro_batch_max": None,
        "micro_batch_fixed": None,
        **given,
    }
    return Launch(
        attempt=attempt,
        rank=0,
        plan=plan,
        program_kind="script",
        program="",
        args=(),
        run_id="test",
        seed=0,
        checkpoint_dir=str(folder),
        checkpoint_every_s=None,
        keep=3,
        in_process=True,
        global_batch_size=None,
        last_step=0,
        **settings,
    )
