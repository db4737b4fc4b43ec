"""How long training waits for a checkpoint, against a plain ``tf.train.Checkpoint``.

    python -m benchmarks.checkpoint [--rounds 9] [--mib 128] [--folder DIR]

For each model, all ways save the same weights and optimizer slots to the same disk in
turn, between steps of a training:

- ``plain``: ``tf.train.Checkpoint.save``; training waits for all of it;
- ``held``: oomrun's writer where the device has no memory of its own: training waits
  until it holds all values, which are copied and written beside the next steps;
- ``copied``: oomrun's writer elsewhere: training waits until all is copied.

``blocked_s`` is what training waits for in the call. ``extra_s`` is all that a
checkpoint takes from it: the call and the steps beside which is written, over as many
steps with no checkpoint, in the same round. Both also as a ratio to plain's. ``cpu_s``
is the process's processor time for the same, copies, checksums and writing included: it
says most on a machine that does other work too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

from oomrun import host
from oomrun.worker import checkpointing


def model_of(mib: float, layers: int) -> Any:
    """A model whose weights and slots of Adam take ``mib``."""
    width = max(8, int((mib * 2**20 / 4 / 3 / layers) ** 0.5))
    model = keras.Sequential(
        [keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Training:
    """Steps of a model, to be taken beside a checkpoint."""

    def __init__(self, model: Any, rows: int) -> None:
        shape = (rows, model.input_shape[-1])
        self._data = (tf.random.normal(shape), tf.random.normal(shape))
        self._step = tf.function(model.train_step)
        self.steps(3)

    def steps(self, count: int) -> None:
        """Takes them, and waits for the last one's result."""
        for _ in range(count):
            logs = self._step(self._data)
        float(logs["loss"])


def timed(save: Callable[[], None], train: Callable[[], None]) -> dict[str, float]:
    """What a call of ``save`` and the steps after it take."""
    cpu, began = time.process_time(), time.perf_counter()
    save()
    blocked_s = time.perf_counter() - began
    train()
    return {
        "blocked_s": blocked_s,
        "extra_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
    }


def measure(model: Any, folder: Path, rounds: int, rows: int) -> dict[str, Any]:
    """The medians over ``rounds`` saves of each kind, in turn."""
    done: list[float] = []
    held, copied = (
        checkpointing.Writer(
            folder / name,
            2,
            lambda name, size, seconds, blocked_s, context: done.append(seconds),
            lambda reason, context: sys.exit(reason),
            behind=behind,
        )
        for name, behind in (
            ("held", lambda size: host.room_bytes() >= size),
            ("copied", None),
        )
    )
    plain = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    training = Training(model, rows)
    state: dict[str, Any] = {"fit": 1}
    number = 0
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "held": lambda: held.save(f"step-{number:010d}", model, state, None),
        "copied": lambda: copied.save(f"step-{number:010d}", model, state, None),
        "plain": lambda: plain.save(str(folder / "plain" / "ckpt")),
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    steps = 0
    for number in range(rounds + 1):
        for kind, save in kinds.items():
            took = timed(save, functools.partial(training.steps, max(1, steps)))
            while not (held.wait(0) and copied.wait(0)):
                training.steps(1)
                steps += number == 0  # so many are needed for it to be written beside
            if number:  # the first one makes folders and loads code
                found[kind].append(took)
        shutil.rmtree(folder / "plain")
    steps = max(1, steps)
    return {
        "mib": round(checkpointing.state_bytes(model) / 2**20, 1),
        "variables": len(checkpointing.training_variables(model)),
        "steps": steps,
        "step_s": round(_median(found["none"], "extra_s") / steps, 4),
        "written_s": round(statistics.median(done), 4),
        **_compared(found),
    }


def _compared(found: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """The medians of each kind, over those of no checkpoint in the same round."""
    medians = {}
    for kind in ("plain", "held", "copied"):
        over = [
            {
                "blocked_s": took["blocked_s"],
                **{key: took[key] - none[key] for key in ("extra_s", "cpu_s")},
            }
            for took, none in zip(found[kind], found["none"], strict=True)
        ]
        medians[kind] = {key: round(_median(over, key), 4) for key in over[0]}
    for kind in ("held", "copied"):
        for key in ("blocked", "extra", "cpu"):
            ratio = medians[kind][f"{key}_s"] / medians["plain"][f"{key}_s"]
            medians[kind][f"{key}_ratio"] = round(ratio, 3)
    return medians


def _median(values: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(value[key] for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=float, default=128.0)
    parser.add_argument("--rows", type=int, default=64, help="of a step")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = {
            f"{layers} layers": measure(
                model_of(args.mib, layers), folder, args.rounds, args.rows
            )
            for layers in (4, 40)
        }
    finally:
        shutil.rmtree(folder)
    passed = all(item["held"]["blocked_ratio"] <= 0.10 for item in found.values())
    print(json.dumps({"limit": 0.10, "models": found, "passed": passed}, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
