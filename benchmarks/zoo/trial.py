"""One trial: does an entry train at a micro-batch, and with how much memory?

Covers: some steps of ``fit`` under oomrun's engine in this process, with the limit and
the settings that a worker of oomrun's would have; what each step took; how it ended.
Does not cover: which micro-batches to try, and in which process
(``benchmarks.oracle``).
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.zoo import ZOO
from benchmarks.zoo.outcome import Case, Outcome
from engine.harness import Engine
from oomrun.core.plan import DevicePlan, Plan
from oomrun.environment import worker_environment
from oomrun.worker import pool

__all__ = ["limited", "run"]

_MIB = 2**20


class _ExhaustedError(Exception):
    """Memory ran out in a step."""


class _Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Reads the allocator around each step."""

    def __init__(self, engine: Engine, size: int) -> None:
        super().__init__()
        self._engine, self._size = engine, size
        self._began = 0.0
        self.rests: list[int] = []
        self.peaks: list[int] = []
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rests.append(_memory()["current"])
        tf.config.experimental.reset_memory_stats("CPU:0")
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        size = self._engine.ran[-1].size
        if size != self._size:
            raise ValueError(f"the engine took {size} samples a pass")
        self.peaks.append(_memory()["peak"])
        self.seconds.append(round(time.perf_counter() - self._began, 3))


def run(case: Case, micro: int, steps: int) -> Outcome:
    """Takes ``steps`` steps at a micro-batch, in a process that does nothing else.

    TensorFlow must not have touched a device in it before. Where the engine asks for a
    restart, the process ends with oomrun's code for that.
    """
    began = time.perf_counter()
    os.environ.update(limited(case.limit_mib))
    pool.gather_on_first_use()
    entry = ZOO[case.entry]
    ended, message = "ran", ""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        model = entry.build(case.optimizer, case.xla)
        watch = _Steps(engine, min(micro, entry.batch))
        # Trying smaller sizes, as a worker would, costs ten seconds for each.
        setattr(engine.session.micro_batches, "shrink", _exhausted)  # noqa: B010
        try:
            with engine.on(micro):
                entry.fit(model, steps, [watch])
        except (_ExhaustedError, tf.errors.ResourceExhaustedError) as error:
            ended, message = "oom", str(error)[:300]
        return Outcome(
            micro=micro,
            wanted=steps,
            ended=ended,
            state_bytes=_state_bytes(model),
            batch_bytes=entry.batch_bytes,
            rests=tuple(watch.rests),
            peaks=tuple(watch.peaks),
            seconds=tuple(watch.seconds),
            seconds_all=round(time.perf_counter() - began, 1),
            message=message,
        )


def _exhausted(
    size: int, samples: int, phase: str, message: str, *, safe: bool
) -> bool:
    found = re.search(r"OOM when allocating tensor[^\n]*", message)
    raise _ExhaustedError(f"in {phase}: {found.group() if found else message}")


def _memory() -> dict[str, int]:
    memory: dict[str, int] = tf.config.experimental.get_memory_info("CPU:0")
    return memory


def _state_bytes(model: Any) -> int:
    variables = [*model.variables, *model.optimizer.variables]
    return sum(
        int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
        for v in {id(v): v for v in variables}.values()
        if tf.as_dtype(v.dtype).is_numpy_compatible
    )


def limited(limit_mib: int) -> dict[str, str]:
    """The settings that oomrun gives a worker whose CPU device has this limit."""
    limit = limit_mib * _MIB
    plan = Plan(
        strategy="single",
        strategy_reason="",
        global_batch_size=None,
        memory_mode="limit",
        devices=(
            DevicePlan(id="cpu:0", kind="cpu", limit_bytes=limit, budget_bytes=limit),
        ),
    )
    env = worker_environment({}, {}, plan, run_id="", seed=0, launch_file=Path())
    return {k: v for k, v in env.items() if k.startswith(("TF_", "CUDA_"))}
