"""A step that fails has changed nothing that cannot be put back, or says that it has.

In process with TensorFlow, in float64. The exhaustion is raised by an operation, at
once: TensorFlow's own allocators wait 10 s before they give up
(``tests/e2e/test_recovery.py`` does).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.backend.common import global_state

from oomrun.worker import checkpointing, randomness
from oomrun.worker.engine import models, slicing, snapshot, step
from oomrun.worker.engine.loss_step import LossStep
from oomrun.worker.engine.objects import Objects

BATCH = 6
# No gradient of the input is asked for.
PLACES = [*(f"forward {n}" for n in range(4)), *(f"backward {n}" for n in (1, 2, 3))]
# Eagerly what an operation in Python raises comes through as it is.
EXHAUSTED = (tf.errors.ResourceExhaustedError, MemoryError)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def nowhere() -> None:
    Failure.now = "nowhere"


class Failure:
    """Where memory runs out."""

    now = "nowhere"


def here(place: str) -> Any:
    """0 where memory does not run out, a float64 tensor."""

    def allocate() -> Any:
        if Failure.now == place:
            raise MemoryError("OOM when allocating tensor")
        return np.zeros(())

    found = tf.numpy_function(allocate, [], tf.float64)
    found.set_shape(())
    return found


class Fails(layers.Layer):
    """May run out of memory once its input is there, or its gradient's."""

    def __init__(self, spot: int) -> None:
        super().__init__()
        self.spot = spot

    def call(self, x: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def through(value: Any) -> Any:
            with tf.control_dependencies([value]):
                forward = value + here(f"forward {self.spot}")

            def gradient(upstream: Any) -> Any:
                with tf.control_dependencies([upstream]):
                    return upstream + here(f"backward {self.spot}")

            return forward, gradient

        return through(x)


class Draws(layers.Layer):
    """Draws from the state that Keras makes when it is first asked for one."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            x += 0.1 * keras.random.normal(keras.ops.shape(x), dtype="float64")
        return x


class FailingSgd(keras.optimizers.SGD):  # type: ignore[misc]
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = gradient + here("apply")
        super().update_step(gradient, variable, learning_rate)


def built(*, draws: bool = False) -> Any:
    """A model of which a pass changes statistics, generators' states and metrics."""
    global_state.set_global_attribute("global_seed_generator", None)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)), Fails(0),
            layers.Dense(5), Fails(1),
            layers.BatchNormalization(), Fails(2),
            layers.Dropout(0.5), *([Draws()] if draws else []), Fails(3),
            layers.Dense(2),
        ]
    )  # fmt: skip
    model.compile(FailingSgd(0.1, momentum=0.9), "mse", metrics=["mae"])
    model._symbolic_build(data_batch=models.unpack(batch()))
    return model


def batch() -> Any:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(BATCH, 4)), rng.normal(size=(BATCH, 2))]
    return slicing.as_tensors(arrays)


def of_fit(model: Any) -> tuple[step.StepFunction, Any]:
    return step.StepFunction(model), model


def eagerly(model: Any) -> tuple[step.StepFunction, Any]:
    model.run_eagerly = True
    return step.StepFunction(model), model


def of_loop(model: Any) -> tuple[LossStep, Any]:
    """The step of a loop with the model's own loss and metrics."""
    metric = keras.metrics.MeanAbsoluteError()
    objects = Objects([model, metric], model.optimizer)

    def loss(data: Any) -> Any:
        x, y = data
        found = model(x, training=True)
        metric.update_state(y, found)
        return tf.reduce_mean(tf.square(found - y))

    objects.build(loss, None)
    return LossStep(loss, model.optimizer, objects, undoable=True), objects


@dataclass
class Taken:
    """Steps of one model over one batch."""

    make: Callable[[Any], tuple[Any, Any]]
    micro: int
    in_order: bool

    def __post_init__(self) -> None:
        self.data = batch()
        self.function, kept = self.make(built(draws=self.micro == BATCH))
        self.variables = checkpointing.training_variables(kept)
        if self.in_order:
            # By themselves they are so only where a device has a limit.
            self.function.run_in_order(whole=True)
        if self.micro < BATCH:
            assert self.function.cut(self.data).possible

    def step(self, failing: str = "nowhere") -> None:
        Failure.now = failing
        self.function.run(self.data, BATCH, self.micro)

    @property
    def applying(self) -> bool:
        if isinstance(self.function, LossStep):
            return self.function.line.crossed
        return self.function.applying

    def values(self) -> dict[str, bytes]:
        found = {v.path: v.value.numpy().tobytes() for v in self.variables}
        return found | {"random": repr(randomness.save()).encode()}


EACH_WAY = pytest.mark.parametrize(
    ("make", "micro", "in_order"),
    [
        *itertools.product([of_fit, of_loop], [BATCH, 2], [False, True]),
        *itertools.product([eagerly], [BATCH, 2], [False]),
    ],
)


@EACH_WAY
def test_a_step_that_failed_before_the_line_is_undone(
    make: Any, micro: int, in_order: bool
) -> None:
    taken = Taken(make, micro, in_order)
    taken.step()
    assert taken.applying  # the last thing it did
    before = taken.values()
    for place in PLACES:
        with pytest.raises(EXHAUSTED):
            taken.step(failing=place)
        assert not taken.applying, place
        assert taken.function.snapshot.possible
        taken.function.snapshot.restore()
        assert taken.values() == before, place
    # Taken again, it is the step that it would have been.
    taken.step()
    fresh = Taken(make, micro, in_order)
    fresh.step()
    fresh.step()
    assert list(taken.values().values()) == list(fresh.values().values())


@EACH_WAY
def test_a_step_that_failed_behind_the_line_says_so(
    make: Any, micro: int, in_order: bool
) -> None:
    taken = Taken(make, micro, in_order)
    taken.step()
    for place in (PLACES[0], "apply"):
        with pytest.raises(EXHAUSTED):
            taken.step(failing=place)
        assert taken.applying == (place == "apply")


def test_what_a_pass_may_change_is_all_that_is_copied() -> None:
    model = built()
    model.layers[1].trainable = False
    found = {v.path.split("/", 1)[-1] for v in snapshot.mutable_variables(model)}
    names = {name.rsplit("/", 1)[-1] for name in found}
    assert {"moving_mean", "moving_variance", "seed_generator_state"} <= names
    assert {"total", "count"} <= names
    assert not {"kernel", "bias", "gamma"} & names
