"""Step time of ``fit`` under oomrun against plain ``fit``, in pairs within one process.

    PYTHONPATH=tests python -m benchmarks.overhead [--rounds 15] [--splits 1,4,16]

For each model, the same ``fit`` is timed in turn plain and with the engine in place,
on models that are warm; the ratio is taken pair by pair and its median reported. The
engine sends its events over a real socket, which a thread reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from engine.harness import Engine


def cnn(width: int = 16, batch: int = 64, steps: int = 8) -> tuple[Any, Any, Any, int]:
    """The quickstart's network."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64, 64, 1)),
            layers.Conv2D(width, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * width, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    count = steps * batch
    x = np.random.default_rng(0).random((count, 64, 64, 1), dtype="float32")
    return model, x, np.arange(count) % 10, batch


def transformer(width: int = 64, steps: int = 8) -> tuple[Any, Any, Any, int]:
    """Two encoder blocks over as many tokens as they are wide."""
    layers = keras.layers
    tokens = keras.Input((width,), dtype="int32")
    hidden = layers.Embedding(1000, width)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, width // 4)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        wide = layers.Dense(4 * width, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(width)(wide))
    output = layers.Dense(10, activation="softmax")(
        layers.GlobalAveragePooling1D()(hidden)
    )
    count = steps * 64
    x = np.random.default_rng(0).integers(0, 1000, (count, width))
    return keras.Model(tokens, output), x, np.arange(count) % 10, 64


def dense() -> tuple[Any, Any, Any, int]:
    """A network so small that what Python does in a step shows most."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    x = np.random.default_rng(0).random((6400, 64), dtype="float32")
    return model, x, np.arange(6400) % 10, 64


MODELS: dict[str, Callable[[], tuple[Any, Any, Any, int]]] = {
    "cnn": cnn,
    "transformer": transformer,
    # Steps as long as those that are cut in earnest: a pass has work to do.
    "cnn_large": lambda: cnn(width=32, batch=256, steps=4),
    "transformer_large": lambda: transformer(width=160, steps=4),
    "dense": dense,
}


class _StepTimes(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds from one batch's begin hook to its end hook, steady steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = 0.0
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.began_s)


def measure(engine: Engine, name: str, split: int, rounds: int) -> dict[str, Any]:
    """One model at one split: the same batches plain and under the engine, in turn."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model, x, y, batch = MODELS[name]()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        models.append(model)
    plain, managed = models

    def epoch(model: Any) -> float:
        times = _StepTimes()
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[times])
        return statistics.fmean(times.seconds[1:])

    def engine_epoch() -> float:
        with engine.on(-(-batch // split)):
            return epoch(managed)

    epoch(plain)
    engine_epoch()
    pairs = []
    for index in range(rounds):
        # The first of a pair may find warmer caches than the second: take turns.
        if index % 2:
            theirs, ours = epoch(plain), engine_epoch()
        else:
            ours, theirs = engine_epoch(), epoch(plain)
        pairs.append((ours, theirs))
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    return {
        "model": name,
        "split": split,
        "batch_size": batch,
        "rounds": rounds,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [
            round(ratios[len(ratios) // 4], 4),
            round(ratios[(3 * len(ratios)) // 4], 4),
        ],
        # The best rounds of each: what is left when nothing else used the machine.
        "ratio_best": round(min(o for o, _ in pairs) / min(t for _, t in pairs), 4),
        "plain_best_ms": round(1e3 * min(t for _, t in pairs), 3),
        "oomrun_best_ms": round(1e3 * min(o for o, _ in pairs), 3),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--splits", default="1,4,16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        results = [
            measure(engine, name, int(split), arguments.rounds)
            for name in arguments.models.split(",")
            for split in arguments.splits.split(",")
        ]
    print(json.dumps({"benchmark": "overhead", "results": results}, indent=1))


if __name__ == "__main__":
    main()
