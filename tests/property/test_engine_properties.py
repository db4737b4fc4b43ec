"""Any loss, reduction, weights, sizes: a split step is that of the whole batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from oomrun.worker import checkpointing
from oomrun.worker.engine import models, slicing, step
from precision import precision

REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"]
LOSSES = {
    "mse": keras.losses.MeanSquaredError,
    "huber": keras.losses.Huber,
    "cosine": keras.losses.CosineSimilarity,
    "log_cosh": keras.losses.LogCosh,
}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(2, 9))
    return {
        "loss": draw(st.sampled_from(sorted(LOSSES))),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "weights": draw(st.sampled_from(["none", "some", "zeros"])),
        "masked": draw(st.booleans()),
        "second": draw(st.none() | st.floats(0.0, 3.0)),
        "regularised": draw(st.booleans()),
        # A whole batch, then a partial one, as at an epoch's end.
        "sizes": (batch, draw(st.integers(1, batch))),
        "micros": draw(
            st.lists(st.integers(1, batch), min_size=1, max_size=3, unique=True)
        ),
        "seed": draw(st.integers(0, 2**16)),
    }


def make(case: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(case["seed"])
    x = keras.Input((4, 3))
    h = layers.Masking()(x) if case["masked"] else x
    h = layers.SimpleRNN(3, return_sequences=True)(h) if case["masked"] else h
    l2 = "l2" if case["regularised"] else None
    outputs = [layers.Dense(2, kernel_regularizer=l2, name="p")(h)]
    losses: list[Any] = [LOSSES[case["loss"]](reduction=case["reduction"])]
    if case["second"] is not None:
        outputs.append(layers.Dense(2, name="q")(h))
        losses.append("mae")
    model = keras.Model(x, outputs)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        losses,
        loss_weights=None if case["second"] is None else [1.0, case["second"]],
    )
    return model


def data(case: dict[str, Any], size: int) -> Any:
    rng = np.random.default_rng(case["seed"] + size)
    x = rng.normal(size=(size, 4, 3))
    if case["masked"]:
        x[np.arange(4) >= rng.integers(0, 5, size=(size, 1))] = 0
    outputs = 1 if case["second"] is None else 2
    y = [rng.normal(size=(size, 4, 2)) for _ in range(outputs)]
    if case["weights"] == "none":
        return slicing.as_tensors((x, y))
    weights = rng.uniform(size=(size, 4)) * (case["weights"] == "some")
    return slicing.as_tensors((x, y, [weights] * outputs))


def state(model: Any) -> list[np.ndarray[Any, Any]]:
    return [v.value.numpy().copy() for v in checkpointing.training_variables(model)]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(cases())
def test_a_split_step_is_the_step_of_the_whole_batch(case: dict[str, Any]) -> None:
    with precision("float64"):
        batches = [data(case, size) for size in case["sizes"]]
        wanted = make(case)
        wanted._symbolic_build(data_batch=models.unpack(batches[0]))
        before = state(wanted)
        wanted.run_eagerly = False
        function = wanted.make_train_function() or wanted.train_function
        for batch in batches:
            logs = function(iter([batch]))
        wanted_loss = float(logs["loss"])
        found = make(case)
        found._symbolic_build(data_batch=models.unpack(batches[0]))
        ours = step.StepFunction(found)
        for micro in case["micros"]:
            variables = checkpointing.training_variables(found)
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            for batch, size in zip(batches, case["sizes"], strict=True):
                logs = ours.run(batch, size, micro)
            # Keras does not weight the losses of each output by the batch's size.
            weights = [v for v in variables if "compile_loss" not in v.path]
            for variable in weights:
                place = next(i for i, v in enumerate(variables) if v is variable)
                a, b = variable.value.numpy(), state(wanted)[place]
                scale = max(float(np.linalg.norm(b)), 1e-3)
                assert float(np.abs(a - b).max()) <= 1e-10 * scale, variable.path
            assert abs(float(logs["loss"]) - wanted_loss) <= 1e-10 * max(
                1.0, abs(wanted_loss)
            )
    keras.backend.clear_session()
    tf.random.set_seed(None)
