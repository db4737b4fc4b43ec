"""What a step keeps in Python: as it was before the trials, and no batch cut by it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from oomrun.worker.engine import attributes, keeping, models, separability, slicing
from oomrun.worker.engine.step import StepFunction
from oomrun.worker.engine.trial import try_evaluation

pytestmark = pytest.mark.usefixtures("float64")


def count(kept: Any) -> None:
    kept.number += 1


def label(kept: Any) -> None:
    kept.text += "a"


def append(kept: Any) -> None:
    kept.items.append(len(kept.items))


def drop_first(kept: Any) -> None:
    kept.items[:] = [*kept.items[1:], kept.items[-1] + 1]


def enter(kept: Any) -> None:
    kept.named["steps"] = kept.named.get("steps", 0) + 1


def enter_within(kept: Any) -> None:
    kept.named["all"].append(1)


def enter_in_order(kept: Any) -> None:
    kept.ordered[len(kept.ordered)] = 1


def add(kept: Any) -> None:
    kept.some.add(max(kept.some) + 1)


def queue(kept: Any) -> None:
    kept.last_three.append(kept.last_three[-1] + 1)


def write(kept: Any) -> None:
    kept.sums += 1.0


KEEPING = (
    count, label, append, drop_first, enter, enter_within, enter_in_order, add, queue,
    write,
)  # fmt: skip


class Kept:
    """What a script's own class may hold."""

    def hold(self, keep: Callable[[Any], None]) -> None:
        self.keep = keep
        self.number, self.text = 3, "b"
        self.items, self.some = [1, 2], {5}
        self.named = {"all": [4]}
        self.ordered = OrderedDict({0: 1})
        self.last_three = deque([1, 2, 3], maxlen=3)
        self.sums = np.zeros(2)

    def held(self) -> Any:
        return {
            name: repr(getattr(self, name))
            for name in (
                "number", "text", "items", "some", "named", "ordered", "last_three",
                "sums",
            )
        }  # fmt: skip


class KeepingLayer(Kept, layers.Layer):  # type: ignore[misc]
    def __init__(self, keep: Callable[[Any], None]) -> None:
        super().__init__()
        self.hold(keep)

    def call(self, x: Any) -> Any:
        self.keep(self)
        return x


class KeepingModel(Kept, keras.Model):  # type: ignore[misc]
    def __init__(self, keep: Callable[[Any], None]) -> None:
        super().__init__()
        self.hold(keep)
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        self.keep(self)
        return super().train_step(data)


class KeepingMetric(Kept, keras.metrics.Mean):  # type: ignore[misc]
    def __init__(self, keep: Callable[[Any], None]) -> None:
        super().__init__(name="own")
        self.hold(keep)

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.keep(self)
        return super().update_state(y_pred)


class KeepingLoss(Kept, keras.losses.Loss):  # type: ignore[misc]
    def __init__(self, keep: Callable[[Any], None]) -> None:
        super().__init__()
        self.hold(keep)

    def call(self, y: Any, y_pred: Any) -> Any:
        self.keep(self)
        return tf.reduce_mean(tf.square(y - y_pred), -1)


def made(
    kind: type, keep: Callable[[Any], None], *, eager: bool
) -> tuple[Any, Any, Any]:
    """A built model, what in it keeps something, and a batch."""
    rng = np.random.default_rng(0)
    batch = slicing.as_tensors((rng.normal(size=(8, 4)), rng.normal(size=(8, 2))))
    keeper = kind(keep)
    parts = [keeper] if kind is KeepingLayer else []
    model = keeper
    if kind is not KeepingModel:
        model = keras.Sequential([keras.Input((4,)), *parts, layers.Dense(2)])
    loss = keeper if kind is KeepingLoss else "mse"
    metrics = [keeper] if kind is KeepingMetric else []
    model.compile("adam", loss, metrics=metrics, run_eagerly=eager)
    model._symbolic_build(data_batch=models.unpack(batch))
    return model, keeper, batch


@pytest.mark.parametrize("keep", KEEPING)
@pytest.mark.parametrize("kind", [KeepingLayer, KeepingModel, KeepingMetric])
def test_a_step_that_keeps_something_is_not_cut_when_run_eagerly(
    kind: type, keep: Callable[[Any], None]
) -> None:
    model, keeper, batch = made(kind, keep, eager=True)
    objects = {name: id(value) for name, value in vars(keeper).items()}
    before = keeper.held()
    reason = StepFunction(model).cut(batch).reason
    assert "keeps numbers in Python" in reason
    if kind is not KeepingLayer:  # a trial of the loss alone calls layers
        assert keeper.held() == before
    # Whoever else has the same list sees the same.
    for name in ("items", "some", "named", "ordered", "last_three", "sums"):
        assert id(getattr(keeper, name)) == objects[name]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("keep", KEEPING)
@pytest.mark.parametrize("kind", [KeepingLayer, KeepingMetric])
def test_the_trial_of_an_evaluation_is_not_seen(
    kind: type, keep: Callable[[Any], None], eager: bool
) -> None:
    model, keeper, batch = made(kind, keep, eager=eager)
    before = keeper.held()
    try_evaluation(model, batch)
    assert keeper.held() == before


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("keep", KEEPING)
@pytest.mark.parametrize("kind", [KeepingLayer, KeepingLoss])
def test_the_trial_of_a_whole_batch_is_not_seen(
    kind: type, keep: Callable[[Any], None], eager: bool
) -> None:
    model, keeper, batch = made(kind, keep, eager=eager)
    before = keeper.held()

    def loss_of(**given: Any) -> Any:
        return models.loss_of(model, **given)

    separability.trial_of_all(model, models.unpack(batch), loss_of)
    assert keeper.held() == before


@pytest.mark.parametrize("keep", KEEPING)
def test_a_step_that_was_taken_back_has_left_nothing(
    keep: Callable[[Any], None],
) -> None:
    model, keeper, batch = made(KeepingModel, keep, eager=True)
    before = keeper.held()
    with keeping.left_as_it_was(keeping.variables_of(model), model):
        model.train_step(batch)
        assert keeper.held() != before
    assert keeper.held() == before


class Lazy(layers.Layer):  # type: ignore[misc]
    """Makes itself what it needs when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.last, self.calls = False, None, 0
        self.tables: list[tf.Variable] = []

    def call(self, x: Any) -> Any:
        if not self.ready:
            self.tables.append(tf.Variable(2.0))
            self.scale = tf.Variable(3.0)
            self.ready = True
        self.last = x
        self.calls += 1
        return x


def test_what_a_layer_has_made_itself_stays_and_what_it_was_given_does_not() -> None:
    layer = Lazy()
    with attributes.left_as_they_were(layer):
        layer(tf.ones((2, 3)))
    assert layer.ready
    assert layer.calls == 0
    assert (len(layer.tables), float(layer.scale)) == (1, 3.0)
    held = layer.last
    with attributes.left_as_they_were(layer):
        layer(tf.zeros((2, 3)))
        layer.other = 1
    assert layer.last is held
    assert not hasattr(layer, "other")


def test_lists_still_find_the_layers_that_are_put_into_them() -> None:
    layer = KeepingLayer(append)
    with attributes.left_as_they_were(layer):
        layer.keep(layer)
    assert layer.items == [1, 2]
    layer.items.append(layers.Dense(2))
    assert layer.items[-1] in layer._layers
