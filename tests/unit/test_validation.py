"""What validation keeps on a limited device is there before sizes are tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker import validation

X, Y = np.zeros((20, 3)), np.arange(20.0)


@pytest.fixture
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "1")
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "500")


def arguments(**changed: Any) -> dict[str, Any]:
    """Of a ``fit`` that validates after each of three epochs."""
    return {
        "x": X, "y": Y, "sample_weight": None, "batch_size": 5, "epochs": 3,
        "initial_epoch": 0, "validation_split": 0.0, "validation_data": (X, Y),
        "validation_freq": 1, "validation_steps": None, "validation_batch_size": None,
        **changed,
    }  # fmt: skip


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, True),
        ({"validation_data": (tf.constant(X),)}, True),
        ({"validation_data": ({"a": X, "b": X}, Y, Y)}, True),
        ({"validation_data": None, "validation_split": 0.25}, True),
        ({"validation_freq": 2}, True),
        ({"validation_freq": [2]}, True),
        # Not before the last epoch is done.
        ({"epochs": 1}, False),
        ({"initial_epoch": 2}, False),
        ({"validation_freq": 3}, False),
        ({"validation_freq": [3]}, False),
        # Nothing, or nothing that stays.
        ({"validation_data": None}, False),
        ({"validation_data": tf.data.Dataset.from_tensors((X, Y))}, False),
        ({"validation_data": (tf.data.Dataset.from_tensors(X), Y)}, False),
        ({"validation_data": iter([(X, Y)])}, False),
        ({"validation_data": (np.array(["a", "b"], object), Y)}, False),
        ({"validation_data": None, "validation_split": 0.25, "x": [[1.0]]}, False),
        # Keras says what is wrong with it.
        ({"validation_data": (X, Y, Y, Y)}, False),
        ({"validation_data": ()}, False),
        ({"validation_freq": 0}, False),
        ({"validation_freq": "often"}, False),
    ],
)
def test_what_of_a_fit_is_foreseen(changed: dict[str, Any], wanted: bool) -> None:
    found = validation.foreseen(arguments(**changed))
    assert (found is not None) == wanted


def test_without_a_limit_nothing_is_changed() -> None:
    asked = arguments(validation_data=None, validation_split=0.25)
    assert validation.foreseen(asked) is None
    assert asked == arguments(validation_data=None, validation_split=0.25)


@pytest.mark.usefixtures("_limited")
def test_a_split_is_made_as_keras_makes_it() -> None:
    asked = arguments(validation_data=None, validation_split=0.25)
    assert validation.foreseen(asked) is not None
    assert asked["validation_split"] == 0.0
    np.testing.assert_array_equal(asked["y"], Y[:15])
    x, y, weights = asked["validation_data"]
    assert (x.shape, list(y), weights) == ((5, 3), list(Y[15:]), None)


class Model:
    """Keeps an iterator between epochs, as Keras's do."""

    _eval_epoch_iterator: Any = None


class Copied:
    """What Keras's iterator is for us: a copy of the arrays."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.y = np.array(settings["y"])


@pytest.mark.usefixtures("_limited")
def test_the_iterator_is_made_as_keras_makes_it_and_kept_where_keras_does() -> None:
    found = validation.foreseen(arguments(validation_batch_size=4))
    assert found is not None
    model = Model()
    training = {"x": X, "distribute_strategy": 1, "steps_per_execution": 2}
    found.make(model, Copied, training)
    settings = model._eval_epoch_iterator.settings
    assert (settings["batch_size"], settings["shuffle"]) == (4, False)
    assert (settings["distribute_strategy"], settings["steps_per_execution"]) == (1, 2)
    assert settings["x"] is X


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "float16"])
def test_what_has_changed_until_the_first_validation_is_read_anew(dtype: str) -> None:
    y = np.zeros((4, 6), dtype)[:, ::2]  # not in one piece
    found = validation.foreseen(arguments(validation_data=({"a": X, "b": y}, y)))
    assert found is not None
    model = Model()
    found.make(model, Copied, {})
    first = model._eval_epoch_iterator
    y[3, 2] = 1
    found.before_use(model)
    second = model._eval_epoch_iterator
    assert (first.y[3, 2], second.y[3, 2]) == (0, 1)
    # Keras reads them once; what is written later was too late for it, too.
    y[0, 0] = 1
    found.before_use(model)
    assert model._eval_epoch_iterator is second


@pytest.mark.usefixtures("_limited")
def test_what_has_not_changed_is_not_read_anew() -> None:
    found = validation.foreseen(arguments())
    assert found is not None
    model = Model()
    found.make(model, Copied, {})
    first = model._eval_epoch_iterator
    found.before_use(model)
    assert model._eval_epoch_iterator is first


@pytest.mark.usefixtures("_limited")
def test_what_keras_refuses_is_left_to_it() -> None:
    def original(**settings: Any) -> object:
        raise ValueError("data cardinality is ambiguous")

    found = validation.foreseen(arguments())
    assert found is not None
    model = Model()
    found.make(model, original, {})
    found.before_use(model)
    assert model._eval_epoch_iterator is None
