"""How a loss can be cut is found by trying; what cannot be cut exactly is not."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker import caveats
from oomrun.worker.engine import slicing
from oomrun.worker.engine.separability import Separability, judge
from oomrun.worker.engine.step import Cut, StepFunction

ROWS = 11


pytestmark = pytest.mark.usefixtures("float64")


def sum_of_squares(y: Any, predicted: Any) -> Any:
    return tf.reduce_sum(tf.square(y - predicted))


def mean_of_squares(y: Any, predicted: Any) -> Any:
    return tf.reduce_mean(tf.square(y - predicted))


def compares_samples(y: Any, predicted: Any) -> Any:
    """As a contrastive loss does: each sample against the batch's mean."""
    return tf.reduce_mean(tf.square(predicted - tf.reduce_mean(predicted, 0)))


class SumOfOutputs(keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        self.add_loss(1e-3 * tf.reduce_sum(tf.square(x)))
        return x


class AlwaysNoisy(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(
            keras.ops.shape(x), dtype=x.dtype, seed=self.seed
        )


class OwnLoss(keras.Model):  # type: ignore[misc]
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return tf.reduce_sum(tf.abs(y - y_pred))


def model(loss: Any, *layers: Any, regularizer: str | None = None) -> Any:
    keras.utils.set_random_seed(3)
    made = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, kernel_regularizer=regularizer),
            *layers,
        ]
    )
    made.compile("sgd", loss)
    return made


def own_loss() -> Any:
    keras.utils.set_random_seed(3)
    x = keras.Input((5,))
    made = OwnLoss(x, keras.layers.Dense(4)(x))
    made.compile("sgd")
    return made


class MeanOfRows(keras.Model):  # type: ignore[misc]
    """Keras's loss for each sample, and a mean of its own over them."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        of_rows = keras.losses.MeanSquaredError(reduction="none")
        return tf.reduce_mean(of_rows(y, y_pred))


def mean_of_rows() -> Any:
    keras.utils.set_random_seed(3)
    x = keras.Input((5,))
    made = MeanOfRows(x, keras.layers.Dense(4)(x))
    made.compile("sgd")
    return made


def batch() -> tuple[Any, Any, None]:
    rng = np.random.default_rng(0)
    return tf.constant(rng.random((ROWS, 5))), tf.constant(rng.random((ROWS, 4))), None


def stepper(made: Any) -> StepFunction:
    made._symbolic_build(data_batch=batch())
    return StepFunction(made)


CASES = [
    (lambda: model("mse"), Separability.MEAN),
    (lambda: model("mse", regularizer="l2"), Separability.MEAN),
    (lambda: model(mean_of_squares), Separability.MEAN),
    (lambda: model(keras.losses.MeanSquaredError(reduction="sum")), Separability.MEAN),
    (lambda: model(keras.losses.MeanSquaredError(reduction="none")), Separability.SUM),
    (mean_of_rows, Separability.MEAN),
    (lambda: model(sum_of_squares), Separability.SUM),
    (own_loss, Separability.SUM),
    (lambda: model(compares_samples), Separability.NONE),
    (lambda: model("mse", SumOfOutputs()), Separability.NONE),
    (lambda: model("mse", AlwaysNoisy()), Separability.MEAN),
]


@pytest.mark.parametrize(("make", "expected"), CASES)
def test_what_a_trial_finds(make: Any, expected: Separability) -> None:
    made = make()
    function = stepper(made)
    before = [v.numpy() for v in made.variables]
    assert function.cut(batch()).separability is expected
    for variable, value in zip(made.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: model(sum_of_squares),
        own_loss,
        mean_of_rows,
        lambda: model(keras.losses.MeanSquaredError(reduction="none")),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 5, 10])
def test_a_sum_is_cut_as_a_sum(make: Any, size: int) -> None:
    plain = make()
    x, y, _ = batch()
    logs = plain.train_on_batch(x, y, return_dict=True)
    made = make()
    function = stepper(made)
    function.cut(batch())
    ours = function.run(batch(), ROWS, size)
    np.testing.assert_allclose(float(ours["loss"]), logs["loss"], rtol=1e-12)
    for one, other in zip(made.weights, plain.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-10)


def test_a_small_difference_is_not_taken_for_rounding() -> None:
    assert judge(1.0, 1.0, 1.0 + 1e-7, 2.0, tolerance=1e-9) is Separability.NONE
    assert judge(1.0, 1.0, 1.0 + 1e-7, 2.0, tolerance=2e-5) is Separability.MEAN
    assert judge(0.0, 0.0, 0.0, 0.0, tolerance=1e-9) is Separability.MEAN


def test_notes_say_what_a_cut_changes() -> None:
    codes = [
        code
        for code, _ in caveats.of_a_cut(
            model("mse", keras.layers.BatchNormalization()),
            Cut(Separability.MEAN),
            "micro_batch",
        )
    ]
    assert codes == ["batch-norm"]
    assert [
        c for c, _ in caveats.of_a_cut(model("mse"), Cut(Separability.MEAN), "freeze")
    ] == []
    ((code, text),) = caveats.of_a_cut(
        model("mse"), Cut(Separability.NONE, "why"), "refuse"
    )
    assert code == "not-separable"
    assert "are not cut" in text


# Losses that compare samples, but not any three of them.


def missing_labels(y: Any, predicted: Any) -> Any:
    known = tf.cast(y > -1, predicted.dtype)
    return tf.reduce_sum(known * tf.square(y - predicted)) / tf.reduce_sum(known)


def hardest(y: Any, predicted: Any) -> Any:
    errors = tf.reduce_mean(tf.square(y - predicted), -1)
    return tf.reduce_mean(tf.math.top_k(errors, 5).values)


def pairs_of_a_class(y: Any, predicted: Any) -> Any:
    """0 unless two samples have one label."""
    same = tf.cast(y[:, None] == y[None], predicted.dtype)[..., 0]
    apart = tf.reduce_sum(tf.square(predicted[:, None] - predicted[None]), -1)
    return tf.reduce_mean(same * apart)


class CentersInTraining(keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any, training: bool = False) -> Any:
        return x - tf.reduce_mean(x, 0) if training else x


class BalancesInTraining(keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(tf.reduce_sum(tf.square(tf.reduce_mean(x, 0))))
        return x


MANY = 40


def many(labels: bool = False) -> tuple[Any, Any, None]:
    rng = np.random.default_rng(1)
    y = rng.random((MANY, 4))
    y[5::9] = -2  # missing, but in none of the first rows and not in the last
    if labels:
        y = np.arange(MANY)[:, None] % 20
    return tf.constant(rng.random((MANY, 5))), tf.constant(y), None


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: model(missing_labels), False),
        (lambda: model(hardest), False),
        (lambda: model(pairs_of_a_class), True),
        (lambda: model("mse", CentersInTraining()), False),
        (lambda: model("mse", BalancesInTraining()), False),
    ],
)
def test_what_compares_samples_now_and_then_is_not_cut(make: Any, labels: bool) -> None:
    made = make()
    data = many(labels)
    made._symbolic_build(data_batch=data)
    assert not StepFunction(made).cut(data).possible


def test_a_loss_of_ones_own_is_still_cut() -> None:
    made = model(mean_of_squares, CentersInTraining())
    data = many()
    made._symbolic_build(data_batch=data)
    assert not StepFunction(made).cut(data).possible
    made = model(mean_of_squares, keras.layers.Dropout(0.5))
    made._symbolic_build(data_batch=data)
    assert StepFunction(made).cut(data).separability is Separability.MEAN


def test_rows_of_a_trial_part_the_longest_from_the_shortest() -> None:
    ragged = tf.ragged.constant([[1], [1, 2], [1, 2, 3], [1, 2]])
    found = slicing.sample((ragged, tf.range(4)), 3)
    assert found[1].numpy().tolist() == [2, 1, 0]
    padded = tf.constant([[1, 1], [1, 0], [0, 0], [1, 0]])
    assert slicing.sample((padded,), 4)[0].numpy().tolist() == [
        [1, 1], [1, 0], [1, 0], [0, 0],
    ]  # fmt: skip
    assert slicing.sample((tf.range(9.0),), 3)[0].numpy().tolist() == [0, 1, 8]
    assert slicing.sample((tf.range(1.0),), 3)[0].numpy().tolist() == [0]
