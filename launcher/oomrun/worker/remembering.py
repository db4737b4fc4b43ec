"""What earlier runs have measured of a model, had from the supervisor.

Covers: the key of a fit, and taking the supervisor's answer to it. Does not cover: the
part of the key that is the model's (``model_key.py``), where it is kept
(``oomrun.profiles``).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from oomrun.core.launch import Launch
from oomrun.core.profile import Environment, full_key
from oomrun.worker import model_key
from oomrun.worker.channel import Channel
from oomrun.worker.fit_call import FitCall
from oomrun.worker.recovery import MicroBatches

__all__ = ["key_of", "take"]

# It is a file of a few kilobytes, read at once; a supervisor that is gone ends us.
_ANSWER_S = 5.0


def key_of(launch: Launch, call: FitCall, data: Any, samples: int | None) -> str | None:
    """The key of a fit's training on batches like ``data``.

    Args:
        launch: what the worker was told.
        call: the fit; its model is built and compiled.
        data: a batch; None where it is not known.
        samples: rows of a global batch.

    Returns:
        None where nothing is to be remembered, or it cannot be said what is trained.
    """
    if launch.environment is None or data is None or not samples:
        return None
    key = call.key(data) if call.key else model_key.key_of(call.model, data)
    if key is None:
        return None
    known = dict(launch.environment)
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    known["versions"] = {**known["versions"], **versions}
    return full_key(key, Environment(**known, global_batch_size=samples))


def take(channel: Channel, key: str, sizes: MicroBatches) -> None:
    """Adds what the supervisor remembers under ``key`` to what this run knows."""
    answer = channel.remembered(key, _ANSWER_S)
    for size, peak in answer.get("measured", ()):
        sizes.note_earlier_peak(size, peak)
    for size, pool in answer.get("recorded", ()):
        sizes.note_earlier_pool(size, pool)
    failed = answer.get("failed")
    if failed is not None:
        sizes.note_failed(failed)
