"""Before a loop's batch is cut: what is tried of its loss function, and refused.

In process with TensorFlow, in float64, with a real session. That what is cut comes out
the same is in ``test_loop.py``. Also what a script is told that has no loop of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import loops
import oomrun
from oomrun.core import events as ev
from oomrun.worker import current

Loss = Callable[[Any], Any]
Make = Callable[[Any], Loss]

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 6)), rng.normal(size=(40, 1))
MISSING = -99.0


pytestmark = pytest.mark.usefixtures("float64")


def network(outputs: int = 1, *more: Any) -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), *more, layers.Dense(outputs)]
    )


def batches(y: Any, size: int = 16) -> list[Any]:
    return [(X[i : i + size], y[i : i + size]) for i in range(0, len(X), size)]


def train(loss: Loss, state: list[Any], data: list[Any]) -> list[float]:
    loop = oomrun.Loop(loss, keras.optimizers.SGD(0.1), state)
    return [float(loop.step(b)) for _ in loop.epochs(2) for b in loop.batches(data)]


def notes(events: list[ev.Event]) -> list[tuple[str, str]]:
    return [(e.code, e.text) for e in events if isinstance(e, ev.Noted)]


def over_present(model: Any) -> Loss:
    """A mean over the labels that are not missing, worked out by hand."""

    def loss(batch: Any) -> Any:
        x, y = batch
        present = tf.cast(y > MISSING, x.dtype)
        return tf.reduce_sum(present * (model(x) - y) ** 2) / tf.reduce_sum(present)

    return loss


def batch_hard(model: Any) -> Loss:
    """Of each sample the farthest of its label: 0 where a label is there once."""

    def loss(batch: Any) -> Any:
        x, labels = batch
        embedded = model(x)
        apart = tf.reduce_sum((embedded[:, None] - embedded[None]) ** 2, -1)
        same = labels[:, None] == labels[None]
        return tf.reduce_mean(tf.reduce_max(tf.where(same, apart, 0.0), 1))

    return loss


def with_missing(every: slice) -> Any:
    y = Y.copy()
    y[every] = MISSING
    return y


COMPARING: dict[str, tuple[Make, int, Any, str]] = {
    # One in the first half of the first batch, none in the rows of the last cut.
    "missing in the first half": (over_present, 1, with_missing(slice(5, 40, 9)), ""),
    "missing in the second half": (over_present, 1, with_missing(slice(13, 14)), ""),
    "pairs of labels": (batch_hard, 4, np.arange(40) % 7, ""),
    "no pair in a half": (batch_hard, 4, np.arange(40) % 16, "exactly zero"),
}


@pytest.mark.parametrize("name", COMPARING)
def test_losses_that_compare_few_samples_are_not_cut(name: str, tmp_path: Path) -> None:
    make, outputs, y, reason = COMPARING[name]
    data = batches(y)
    model = network(outputs)
    wanted = train(make(model), [model], data)
    model = network(outputs)
    with loops.worker(tmp_path, micro_batch_fixed=4) as events:
        assert train(make(model), [model], data) == pytest.approx(wanted, rel=1e-12)
    ((code, text),) = notes(events)
    assert code == "not-separable"
    assert (reason or "compares samples") in text


def test_a_loss_that_is_not_finite_shows_nothing(tmp_path: Path) -> None:
    model = network()
    with loops.worker(tmp_path, micro_batch_fixed=4) as events:
        train(
            lambda batch: (model(batch[0]) - batch[1])[:, 0] ** 2,
            [model],
            batches(np.full_like(Y, np.inf)),
        )
    ((code, text),) = notes(events)
    assert code == "not-separable"
    assert "no finite number" in text


def test_draws_of_many_rows_do_not_look_like_comparing(tmp_path: Path) -> None:
    x, y = rng.normal(size=(80, 6)), rng.normal(size=(80, 1))
    model = network(1, layers.Dropout(0.5), layers.GaussianNoise(0.5))
    with loops.worker(tmp_path, micro_batch_fixed=16) as events:
        train(
            lambda batch: (model(batch[0], training=True) - batch[1])[:, 0] ** 2,
            [model],
            [(x, y)],
        )
    assert [code for code, _ in notes(events)] == ["random-layers"]


def shaped(variable: tf.Variable, how: str) -> None:
    """Counts, as a script may write it."""
    if how == "in a branch":
        tf.cond(
            tf.constant(True),
            lambda: variable.assign_add(1.0),
            lambda: tf.identity(variable),
        )
    elif how == "in a function":
        tf.function(lambda: variable.assign_add(1.0))()
    else:
        variable.assign_add(1.0)


@pytest.mark.parametrize("how", ["plainly", "in a branch", "in a function"])
def test_variables_out_of_state_are_not_written_more_often(
    how: str, tmp_path: Path
) -> None:
    model, data = network(), batches(Y)
    steps = tf.Variable(0.0, dtype="float64", name="annealing")

    def loss(batch: Any) -> Any:
        shaped(steps, how)
        return (model(batch[0], training=True) - batch[1])[:, 0] ** 2

    with loops.worker(tmp_path, micro_batch_fixed=4) as events:
        train(loss, [model], data)
    assert float(steps) == 2 * len(data)
    ((code, text),) = notes(events)
    assert code == "not-separable"
    assert "the variable annealing, which is not in state=[...]" in text


def test_variables_out_of_state_may_be_read(tmp_path: Path) -> None:
    model, other, data = network(), network(), batches(Y)
    numbers = tf.random.Generator.from_seed(1)

    def loss(batch: Any) -> Any:
        noise = keras.random.normal(tf.shape(batch[0])) + numbers.normal(
            tf.shape(batch[0]), dtype="float64"
        )
        teacher = tf.stop_gradient(other(batch[0], training=True))
        return (model(batch[0] + 0.1 * noise) - teacher)[:, 0] ** 2

    with loops.worker(tmp_path, micro_batch_fixed=4) as events:
        train(loss, [model], data)
    assert [code for code, _ in notes(events)] == ["random-layers"]


@pytest.mark.parametrize("managed", [True, False])
def test_a_script_that_uses_nothing_of_ours_is_told(
    managed: bool, tmp_path: Path
) -> None:
    model, data = network(), batches(Y)

    def loss(batch: Any) -> Any:
        return (model(batch[0], training=True) - batch[1])[:, 0] ** 2

    with loops.worker(tmp_path) as events:
        if managed:
            train(loss, [model], data)
        else:
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(data[0]))
            gradients = tape.gradient(value, model.trainable_variables)
            keras.optimizers.SGD(0.1).apply(gradients, model.trainable_variables)
        session = current.session()
        assert session is not None
        session.script_finished()
    codes = [code for code, _ in notes(events)]
    assert codes == ([] if managed else ["nothing-managed"])
