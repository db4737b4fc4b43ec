"""Pulls the levers of the plan, once a process, before the script runs.

Covers: the dtype policy, whether XLA compiles, and handing on to what the others need.
Does not cover: which levers, and when (``oomrun.core.levers``); the allocator, which is
set in the environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.trainers import trainer as keras_trainer

from oomrun.core.spec import OPTIMIZERS
from oomrun.worker import host_pipeline, optimizers, recomputing

__all__ = ["pull"]

_POLICY = "mixed_bfloat16"


def pull(levers: Sequence[str], note: Callable[[str, str], None]) -> None:
    """Applies ``levers``.

    Args:
        levers: those of the plan.
        note: tells a person something, once.
    """
    if "mixed_precision" in levers:
        # Not float16: its range needs a scale for the loss, which the optimizer keeps,
        # and a checkpoint from before has none.
        keras.mixed_precision.set_global_policy(_POLICY)
        note("mixed-precision", f"layers compute in bfloat16 (lever, policy {_POLICY})")
    if "xla_on" in levers or "xla_off" in levers:
        # The one that was pulled last.
        last = [lever for lever in levers if lever.startswith("xla_")][-1]
        _compile_with(last == "xla_on")
    if any(name in levers for name in OPTIMIZERS):
        optimizers.install(levers, note)
    if "recompute" in levers:
        recomputing.install(note)
    if "host_pipeline" in levers:
        host_pipeline.install()


def _compile_with(xla: bool) -> None:
    """From now on models are compiled so, whatever the script says."""
    original = keras_trainer.Trainer.compile

    @functools.wraps(original)
    def compile_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        # Steps that are run eagerly cannot be compiled.
        model.jit_compile = xla and not model.run_eagerly
        return result

    keras_trainer.Trainer.compile = compile_model
