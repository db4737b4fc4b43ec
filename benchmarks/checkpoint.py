"""How long training waits for a checkpoint, against a plain ``tf.train.Checkpoint``.

    python -m benchmarks.checkpoint [--rounds 9] [--mib 128] [--folder DIR]

For each model, both save the same weights and optimizer slots to the same disk in turn.
Waited for is: of ``tf.train.Checkpoint.save`` all of it, of oomrun's writer the copy
that ``save`` makes before it returns. Between two saves the writer comes to its end, as
it does where saves are further apart than they take: that took ``written_s``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from oomrun.worker import checkpointing


def model_of(mib: float, layers: int) -> Any:
    """A model that has taken a step, whose weights and Adam's slots take ``mib``."""
    width = max(8, int((mib * 2**20 / 4 / 3 / layers) ** 0.5))
    model = keras.Sequential(
        [keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))]
    )
    model.compile("adam", "mse")
    batch = np.zeros((2, width), "float32")
    model.train_on_batch(batch, batch)
    return model


def measure(model: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """The medians over ``rounds`` saves of each kind, in turn."""
    done: list[float] = []
    writer = checkpointing.Writer(
        folder / "ours",
        2,
        lambda name, size, seconds, blocked_s, context: done.append(seconds),
        lambda reason, context: sys.exit(reason),
    )
    plain = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    blocked, synchronous = [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        writer.save(f"step-{number:010d}", model, {"fit": 1, "step": number}, None)
        waited = time.perf_counter() - began
        writer.wait()
        began = time.perf_counter()
        path = plain.save(str(folder / "plain" / "ckpt"))
        took = time.perf_counter() - began
        for part in folder.glob(f"plain/{Path(path).name}*"):
            part.unlink()
        if number:  # the first one makes folders and loads code
            blocked.append(waited)
            synchronous.append(took)
    ours, theirs = statistics.median(blocked), statistics.median(synchronous)
    return {
        "mib": round(checkpointing.state_bytes(model) / 2**20, 1),
        "variables": len(checkpointing.training_variables(model)),
        "blocked_s": round(ours, 4),
        "plain_save_s": round(theirs, 4),
        "written_s": round(statistics.median(done[1:]), 4),
        "ratio": round(ours / theirs, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=float, default=128.0)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = {
            f"{layers} layers": measure(model_of(args.mib, layers), folder, args.rounds)
            for layers in (4, 40)
        }
    finally:
        shutil.rmtree(folder)
    passed = all(item["ratio"] <= 0.10 for item in found.values())
    print(json.dumps({"limit": 0.10, "models": found, "passed": passed}, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
