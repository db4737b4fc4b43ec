"""Any model, loss, weights, sizes: a whole ``fit`` in micro-batches is Keras's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers

from engine import comparing
from engine.harness import Engine
from engine.running import seeded

pytestmark = pytest.mark.filterwarnings("default")

LOSSES = {
    "mse": keras.losses.MeanSquaredError,
    "huber": keras.losses.Huber,
    "cosine": keras.losses.CosineSimilarity,
    "log_cosh": keras.losses.LogCosh,
}
REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"]
MODELS = ["dense", "tokens", "two outputs", "regularised"]
METRICS: list[list[Any]] = [[], ["mae"], ["mse", "cosine_similarity"]]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(2, 9))
    kind = draw(st.sampled_from(MODELS))
    return {
        "model": kind,
        "loss": draw(st.sampled_from(sorted(LOSSES))),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "weights": draw(st.sampled_from(["none", "some", "zeros"])),
        "metrics": draw(st.sampled_from(METRICS)),
        "batch": batch,
        # At least one batch that is cut; mostly a partial one at the end.
        "count": batch + draw(st.integers(1, 2 * batch)),
        "micro": draw(st.integers(1, batch - 1)),
        "validation": draw(st.sampled_from(["none", "data", "split"])),
        "epochs": draw(st.integers(1, 2)),
        "steps_per_execution": draw(st.sampled_from([1, 1, 2, 3])),
        "seed": draw(st.integers(0, 2**16)),
    }


def make(case: dict[str, Any], optimizer: Any) -> Any:
    tokens = case["model"] == "tokens"
    x = keras.Input((4,), dtype="int32" if tokens else None)
    h = layers.Embedding(6, 3, mask_zero=True)(x) if tokens else layers.Dense(3)(x)
    l2 = "l2" if case["model"] == "regularised" else None
    outputs = [layers.Dense(2, name="p", kernel_regularizer=l2)(h)]
    if case["model"] == "two outputs":
        outputs.append(layers.Dense(2, name="q")(h))
    model = keras.Model(x, outputs if len(outputs) > 1 else outputs[0])
    loss = LOSSES[case["loss"]](reduction=case["reduction"])
    metrics = [list(case["metrics"]) for _ in outputs]
    model.compile(
        optimizer,
        [loss, "mae"][: len(outputs)],
        loss_weights=[1.0, 0.3] if len(outputs) > 1 else None,
        metrics=metrics,
        weighted_metrics=metrics if case["weights"] == "some" else None,
        steps_per_execution=case["steps_per_execution"],
    )
    return model


def data(case: dict[str, Any], count: int) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights."""
    rng = np.random.default_rng(case["seed"] + count)
    floatx = keras.config.floatx()
    x = rng.normal(size=(count, 4)).astype(floatx)
    shape: tuple[int, ...] = (count, 2)
    if case["model"] == "tokens":
        x, shape = rng.integers(1, 6, size=(count, 4)), (count, 4, 2)
        x[np.arange(4) >= rng.integers(1, 5, size=(count, 1))] = 0
    outputs = 2 if case["model"] == "two outputs" else 1
    y = [rng.normal(size=shape).astype(floatx) for _ in range(outputs)]
    if case["weights"] == "none":
        return x, y if outputs > 1 else y[0], None
    # Beside a mask, Keras 3 takes weights of its shape only: others raise, or fall on
    # the wrong axis where the batch happens to have as many rows as a row has tokens.
    each = shape[:-1]
    weights = rng.uniform(0.1, 2, size=each).astype(floatx)
    if case["weights"] == "zeros":
        weights[: count // 2] = 0
    return x, y if outputs > 1 else y[0], [weights] * 2 if outputs > 1 else weights


def train(case: dict[str, Any], optimizer: Any) -> Any:
    model = make(case, optimizer)
    x, y, weights = data(case, case["count"])
    validation: dict[str, Any] = {}
    if case["validation"] == "data":
        other = data(case, case["batch"] + 1)
        validation["validation_data"] = other if other[2] is not None else other[:2]
    elif case["validation"] == "split" and case["model"] != "two outputs":
        validation["validation_split"] = 0.3
    history = model.fit(
        x, y, sample_weight=weights, batch_size=case["batch"], verbose=0,
        epochs=case["epochs"], **validation,
    )  # fmt: skip
    return history, model


def both(case: dict[str, Any], floatx: str, optimizer: Any) -> tuple[Any, Any]:
    """What plain Keras and the engine come to, as numbers by name."""
    with seeded(floatx):
        wanted = comparing.numbers(train(case, optimizer()))
    with seeded(floatx), tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        with engine.on(case["micro"], case["micro"]):
            found = comparing.numbers(train(case, optimizer()))
        engine.close()
    cut = any(ran.cut for ran in engine.ran if ran.phase == "gradients")
    # A split may leave no batch that is larger than a micro-batch.
    assert cut == (_largest_batch(case) > case["micro"])
    return found, wanted


def _largest_batch(case: dict[str, Any]) -> int:
    rows: int = case["count"]
    if case["validation"] == "split" and case["model"] != "two outputs":
        rows = int(rows * (1 - 0.3))  # as Keras reckons
    return min(rows, case["batch"])


def check_history_and_weights(case: dict[str, Any]) -> None:
    found, wanted = both(case, "float64", lambda: keras.optimizers.SGD(0.05, 0.9))
    assert comparing.differences(found, wanted, 1e-10) == []


class Recording(keras.optimizers.SGD):  # type: ignore[misc]
    """Keeps the last gradients among its variables."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.last = [self.add_variable_from_reference(v, "last") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        last = self.last[self._get_variable_index(variable)]
        last.assign(tf.convert_to_tensor(gradient))
        super().update_step(gradient, variable, learning_rate)


def check_float32_gradients(case: dict[str, Any]) -> None:
    found, wanted = both(case, "float32", lambda: Recording(0.001))
    names = [name for name in wanted if "_last" in name]
    assert names
    for name in names:
        error = float(np.linalg.norm(found[name] - wanted[name]))
        assert error <= 1e-5 * max(float(np.linalg.norm(wanted[name])), 1e-3), name


# One failing draw is enough; to look for a smaller one takes minutes.
QUICK = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@settings(QUICK, max_examples=4)
@given(cases())
def test_fit_in_micro_batches_is_fit(case: dict[str, Any]) -> None:
    check_history_and_weights(case)


@settings(QUICK, max_examples=4)
@given(cases())
def test_float32_gradients_are_those_of_the_batch(case: dict[str, Any]) -> None:
    check_float32_gradients(case)


@pytest.mark.slow
@pytest.mark.timeout(0)  # of all examples together, on a machine that may be busy
@settings(QUICK, max_examples=120, derandomize=False)
@given(cases())
def test_fit_in_micro_batches_is_fit_at_length(case: dict[str, Any]) -> None:
    check_history_and_weights(case)


@pytest.mark.slow
@pytest.mark.timeout(0)  # of all examples together, on a machine that may be busy
@settings(QUICK, max_examples=60, derandomize=False)
@given(cases())
def test_float32_gradients_at_length(case: dict[str, Any]) -> None:
    check_float32_gradients(case)
