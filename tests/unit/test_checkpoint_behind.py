"""Checkpoints that are copied and written beside a training that goes on.

The writer is the worker's own, with a real model, real steps and real files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from oomrun.worker import checkpointing

X = np.random.default_rng(0).normal(size=(16, 128)).astype("float32")


def model_of(optimizer: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((128,)),
            *(keras.layers.Dense(600, activation="tanh") for _ in range(4)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(128),
        ]
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(X, X)
    return model


def test_each_is_of_its_step(tmp_path: Path) -> None:
    """Steps are taken while it is copied, and change what was to be copied."""
    failed: list[str] = []
    writer = checkpointing.Writer(
        tmp_path,
        20,
        lambda *_: None,
        lambda reason, _: failed.append(reason),
        behind=lambda _: True,
    )
    model = model_of(keras.optimizers.Adam(use_ema=True))
    variables = checkpointing.training_variables(model)
    expected = {}
    for step in range(1, 9):
        expected[step] = [np.array(v.value.numpy()) for v in variables]
        kept = np.full(3, step)
        state = {"fit": 1, "step": step, "callbacks": {"array": kept}}
        writer.save(f"step-{step:010d}", model, state, None)
        # What a callback does with its own, before it is on disk.
        kept[:] = -1
        for _ in range(3):
            model.train_on_batch(X, X)
    writer.wait()
    assert failed == []
    for step, values in expected.items():
        state, arrays = checkpointing.load(tmp_path / f"step-{step:010d}")
        assert state["step"] == step
        assert state["callbacks"]["array"].tolist() == [step] * 3
        assert checkpointing.saved_variables(arrays) == len(values)
        for index, value in enumerate(values):
            assert arrays[f"variable/{index}"].tobytes() == value.tobytes()


@pytest.mark.parametrize("room", [True, False])
def test_asks_for_room_for_what_is_held(tmp_path: Path, room: bool) -> None:
    asked: list[int] = []

    def behind(size: int) -> bool:
        asked.append(size)
        return room

    writer = checkpointing.Writer(
        tmp_path, 3, lambda *_: None, lambda *_: None, behind=behind
    )
    model = model_of("adam")
    size = sum(v.value.numpy().nbytes for v in checkpointing.training_variables(model))
    for step in (1, 2):
        writer.save(f"step-{step:010d}", model, {"fit": 1, "step": step}, None)
        writer.wait()
    # Memory for the copies is there the second time.
    assert asked == [2 * size, size]
    one, other = (
        checkpointing.load(tmp_path / f"step-{step:010d}")[1] for step in (1, 2)
    )
    assert {k: v.tobytes() for k, v in one.items()} == {
        k: v.tobytes() for k, v in other.items()
    }
