"""Any loss function, sizes and micro-batch: a cut step is that of the whole batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from oomrun.worker import checkpointing
from oomrun.worker.engine import slicing
from oomrun.worker.engine.loss_step import LossStep
from oomrun.worker.engine.objects import Objects
from precision import precision

REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", None]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(2, 9))
    return {
        "values": draw(st.sampled_from(["loss", "mean", "sum", "samples"])),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "masked": draw(st.booleans()),
        "weighted": draw(st.booleans()),
        "regularised": draw(st.booleans()),
        "sizes": (batch, draw(st.integers(1, batch))),
        "micro": draw(st.integers(1, batch)),
        "seed": draw(st.integers(0, 2**16)),
    }


class Trained:
    """A model, a metric and the step of one case."""

    def __init__(self, case: dict[str, Any]) -> None:
        keras.utils.set_random_seed(case["seed"])
        x = keras.Input((4, 3))
        h = layers.SimpleRNN(3, return_sequences=True)(
            layers.Masking()(x) if case["masked"] else x
        )
        l2 = "l2" if case["regularised"] else None
        self.model = keras.Model(x, layers.Dense(2, kernel_regularizer=l2)(h))
        self.metric = keras.metrics.MeanAbsoluteError()
        self.function = keras.losses.Huber(reduction=case["reduction"])
        self.case = case
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.objects = Objects([self.model, self.metric], optimizer)
        self.objects.build(self.loss, None)
        self.step = LossStep(self.loss, optimizer, self.objects, undoable=True)

    def loss(self, batch: Any) -> Any:
        x, y, weights = batch
        predictions = self.model(x)
        self.metric.update_state(y, predictions, weights)
        if self.case["values"] == "loss":
            given = weights if self.case["weighted"] else None
            value = self.function(y, predictions, given)
            # Without a reduction it is a value for each step of each sample.
            more = tf.add_n(self.model.losses) if self.case["regularised"] else 0.0
            return value + more
        squares = tf.reduce_sum(tf.square(predictions - y), [1, 2])
        if self.case["values"] == "samples":
            return squares * weights[:, 0]
        return getattr(tf, f"reduce_{self.case['values']}")(squares)

    def train(self, *batches: Any, micro: int) -> tuple[list[float], list[Any]]:
        losses = []
        for batch in batches:
            samples = slicing.batch_size(batch)
            size = micro if micro < samples and self.step.cut(batch).possible else 99
            losses.append(float(self.step.run(batch, samples, size)))
        variables = checkpointing.training_variables(self.objects)
        return losses, [v.value.numpy().copy() for v in variables]


def data(case: dict[str, Any], size: int) -> Any:
    rng = np.random.default_rng(case["seed"] + size)
    x = rng.normal(size=(size, 4, 3))
    x[np.arange(4) >= rng.integers(0, 5, size=(size, 1))] = 0
    batch = (x, rng.normal(size=(size, 4, 2)), rng.uniform(size=(size, 4)))
    return slicing.as_tensors(batch)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(cases())
def test_a_cut_step_is_that_of_the_whole_batch(case: dict[str, Any]) -> None:
    with precision("float64"):
        batches = [data(case, size) for size in case["sizes"]]
        wanted, state = Trained(case).train(*batches, micro=99)
        cut = Trained(case)
        found, parts = cut.train(*batches, micro=case["micro"])
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    for one, other in zip(parts, state, strict=True):
        error = np.abs(one - other).max(initial=0.0)
        assert error <= 1e-10 * max(np.linalg.norm(other), 1e-3)
    # A sum beside a regularisation that is counted once has no exact cut. All else has.
    unclear = case["values"] == "loss" and case["regularised"]
    few = case["micro"] >= case["sizes"][0]
    assert few or unclear or cut.step.cut(batches[0]).possible
