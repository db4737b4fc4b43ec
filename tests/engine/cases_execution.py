"""Rows: how Keras runs a step, and in which numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from engine.registry import row, section
from engine.samples import (
    classes,
    compiled,
    dataset,
    dense,
    fit,
    regression,
    tagger,
    tokens,
)

section("Execution")


@row("`steps_per_execution`, not a divisor of the steps")
def steps_per_execution(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], steps_per_execution=2)
    return fit(model, *regression(), validation_data=regression()), model


@row("`steps_per_execution`, data of unknown length")
def steps_per_execution_unknown(folder: Path) -> Any:
    model = compiled("adam", steps_per_execution=2)
    data = dataset(*regression()).filter(lambda x, y: tf.shape(x)[0] > 0)
    return fit(model, data), model


@row("`jit_compile=True`", tolerance=1e-10)
def jit_on(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], jit_compile=True)
    return fit(model, *regression(), validation_split=0.3), model


@row(
    "`jit_compile=True`, uncut: bit for bit",
    micro=None,
    evaluate=None,
    tolerance=0,
    slow=True,
)
def jit_uncut(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], jit_compile=True)
    return fit(model, *regression(), validation_split=0.3), model


@row("`jit_compile=False`", slow=True)
def jit_off(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], jit_compile=False)
    return fit(model, *regression()), model


@row('`jit_compile="auto"`')
def jit_auto(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], jit_compile="auto")
    return fit(model, *regression()), model, int(bool(model.jit_compile))


@row("`run_eagerly`")
def run_eagerly(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], run_eagerly=True)
    return fit(model, *regression(), validation_split=0.3), model


@row("`run_eagerly`, masked", slow=True)
def run_eagerly_masked(folder: Path) -> Any:
    model = tagger(run_eagerly=True, metrics=["accuracy"])
    return fit(model, *tokens(), epochs=1), model


@row("`tf.config.run_functions_eagerly`")
def functions_eagerly(folder: Path) -> Any:
    tf.config.run_functions_eagerly(True)
    try:
        model = compiled("adam", metrics=["mae"])
        return fit(model, *regression(), epochs=1), model
    finally:
        tf.config.run_functions_eagerly(False)


@row("uncut batches: bit for bit", micro=None, evaluate=None, tolerance=0)
def uncut(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    return fit(model, *regression(), validation_split=0.3), model


section("Precision")


@row("float32 (Keras's default)", floatx="float32", tolerance=1e-5)
def float32(folder: Path) -> Any:
    model = compiled(keras.optimizers.SGD(0.1, 0.9), metrics=["mae"])
    return fit(model, *regression(), validation_split=0.3), model


@row("float64", slow=True)
def float64(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"])
    return fit(model, *regression(), validation_split=0.3), model


def _mixed(policy: str, optimizer: Any) -> Any:
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(16, "relu"),
            layers.Dense(3),
            layers.Activation("softmax", dtype="float32"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fit(model, *classes()), model


@row(
    "`mixed_float16` with dynamic loss scaling",
    floatx="float32",
    tolerance=1e-2,
    remark="float16 rounds; alike to 1e-2 of each norm, the loss scale exactly",
)
def mixed_float16(folder: Path) -> Any:
    history, model = _mixed("mixed_float16", keras.optimizers.SGD(0.1))
    return history, model, float(model.optimizer.dynamic_scale)


@row(
    "`mixed_float16`, a step whose gradients overflow",
    floatx="float32",
    tolerance=1e-2,
)
def mixed_overflow(folder: Path) -> Any:
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**30
    )
    history, model = _mixed("mixed_float16", optimizer)
    return history, model, float(optimizer.dynamic_scale)


@row(
    "`mixed_float16`, uncut: bit for bit",
    floatx="float32",
    tolerance=0,
    micro=None,
    evaluate=None,
    slow=True,
)
def mixed_uncut(folder: Path) -> Any:
    return _mixed("mixed_float16", keras.optimizers.Adam(0.01))


@row(
    "`mixed_bfloat16`",
    floatx="float32",
    tolerance=5e-2,
    remark="bfloat16 keeps 8 bits; alike to 5e-2 of each norm",
)
def mixed_bfloat16(folder: Path) -> Any:
    return _mixed("mixed_bfloat16", keras.optimizers.SGD(0.1))


@row("a layer with a precision of its own", floatx="float32", tolerance=1e-5)
def layer_precision(folder: Path) -> Any:
    model = dense()
    model.add(layers.Dense(2, dtype="float64"))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return fit(model, *regression()), model
