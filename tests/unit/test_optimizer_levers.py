"""Optimizers of smaller state: what takes the place of what, and what goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import trainer as keras_trainer

from oomrun.core.spec import OPTIMIZERS
from oomrun.worker import checkpointing, model_key, optimizers
from oomrun.worker.adafactor import Adafactor

NOTES: list[tuple[str, str]] = []


@pytest.fixture
def pulled(request: pytest.FixtureRequest) -> Iterator[str]:
    """The lever is in force while the test runs."""
    original = keras_trainer.Trainer.compile
    NOTES.clear()
    optimizers.install([request.param], lambda code, text: NOTES.append((code, text)))
    yield request.param
    keras_trainer.Trainer.compile = original


def model(optimizer: Any, width: int = 8) -> Any:
    keras.utils.set_random_seed(5)
    found = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(width, "relu"),
            keras.layers.Reshape((width // 2, 2)),
            keras.layers.Conv1D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    found.compile(optimizer, "mse")
    return found


def data(width: int = 8) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, width)).astype("float32")
    return x, x[:, :1] * 0.5


def trained(found: Any, epochs: int = 3) -> list[Any]:
    found.fit(*data(), batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    return [weight.numpy() for weight in found.weights]


every = pytest.mark.parametrize("pulled", OPTIMIZERS, indirect=True)


@pytest.mark.parametrize("relative", [True, False])
def test_adafactor_is_that_of_keras(relative: bool) -> None:
    own = keras.optimizers.Adafactor(0.01, relative_step=relative, weight_decay=0.01)
    ours = Adafactor(0.01, relative_step=relative, weight_decay=0.01)
    for one, other in zip(trained(model(own)), trained(model(ours)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
    # And keeps no velocity of matrices.
    assert sum(v.value.shape.num_elements() for v in ours.variables) < 0.6 * sum(
        v.value.shape.num_elements() for v in own.variables
    )


def test_weights_without_a_gradient_make_no_nan() -> None:
    optimizer = Adafactor(0.001)
    weight = keras.Variable(np.ones((4, 6), "float32"), name="w")
    optimizer.build([weight])
    gradient = np.zeros((4, 6), "float32")
    gradient[1, 2] = 10.0
    for _ in range(3):
        optimizer.apply([tf.constant(gradient)], [weight])
    moved = weight.numpy()
    assert np.isfinite(moved).all()
    assert moved[1, 2] < 1.0
    assert (np.delete(moved.ravel(), 8) == 1.0).all()


@every
def test_what_all_optimizers_have_is_taken_over(pulled: str) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    own = keras.optimizers.AdamW(
        rate, weight_decay=0.02, global_clipnorm=1.0, use_ema=True, ema_momentum=0.9
    )
    own.exclude_from_weight_decay(var_names=["bias"])
    found = model(own)
    now = found.optimizer
    assert now is not own
    for name in ("weight_decay", "global_clipnorm", "use_ema", "ema_momentum"):
        assert getattr(now, name) == getattr(own, name)
    trained(found)
    # Each count and rate is one and the same thing for both.
    assert int(own.iterations) == int(now.iterations) == 12
    assert float(now.learning_rate) == float(own.learning_rate)
    bias, kernel = found.layers[0].bias, found.layers[0].kernel
    assert not now._use_weight_decay(bias)
    assert now._use_weight_decay(kernel)
    assert len(own.variables) == 1  # it never made its slots


@every
def test_a_rate_that_the_script_sets_counts(pulled: str) -> None:
    own = keras.optimizers.Adam(0.5)
    found = model(own)
    own.learning_rate = 0.25
    assert float(found.optimizer.learning_rate) == 0.25
    found.optimizer.learning_rate = 0.125
    assert float(own.learning_rate) == 0.125
    names = [variable.name for variable in found.optimizer.variables[:2]]
    assert names == ["iteration", "learning_rate"]


@every
def test_a_model_that_is_compiled_again_keeps_its_state(pulled: str) -> None:
    own = keras.optimizers.Adam(0.01)
    found = model(own)
    first = found.optimizer
    found.compile(own, "mae")
    assert found.optimizer is first


@pytest.mark.parametrize(
    ("pulled", "own"),
    [
        ("optimizer_sgd", lambda: keras.optimizers.SGD(0.1)),
        ("optimizer_lion", lambda: keras.optimizers.RMSprop(0.1)),
        ("optimizer_lion", lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        ("optimizer_adafactor", lambda: keras.optimizers.SGD(0.1)),
        (
            "optimizer_sgd",
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        ),
    ],
    indirect=["pulled"],
)
def test_one_that_would_save_nothing_is_left(pulled: str, own: Any) -> None:
    given = own()
    assert model(given).optimizer is given
    ((code, text),) = NOTES
    assert code == "optimizer"
    assert pulled in text


@every
def test_bytes_of_slots_are_those_that_keras_makes(pulled: str) -> None:
    own = keras.optimizers.Adam(0.01, amsgrad=True)
    found = model(own)
    told = optimizers.replaced(found)
    assert told is not None
    assert (told["lever"], told["written"]) == (pulled, "Adam")
    count = found.count_params()
    assert told["written_bytes"] == 3 * 4 * count
    found.optimizer.build(found.trainable_variables)
    made = found.optimizer.variables[2:]
    assert told["used_bytes"] == sum(4 * v.value.shape.num_elements() for v in made)
    assert told["used_bytes"] < told["written_bytes"] // 2


def saved(found: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    """A checkpoint of the model, written and read as in a run."""
    failed: list[Any] = []
    writer = checkpointing.Writer(
        folder, 3, lambda *_: None, lambda why, _: failed.append(why)
    )
    writer.save("step-1-1", found, {"optimizer": optimizers.in_use(found)}, None)
    writer.wait()
    assert not failed
    state, arrays = checkpointing.load(folder / "step-1-1")
    return {**state, "name": "step-1-1"}, arrays


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("lever", OPTIMIZERS)
def test_a_checkpoint_of_another_optimizer_goes_on_without_its_slots(
    lever: str, ema: bool, tmp_path: Path
) -> None:
    """In both directions: where the lever is pulled, and where it is taken back."""
    plain = model(keras.optimizers.Adam(0.01, use_ema=ema))
    trained(plain)
    before = saved(plain, tmp_path / "plain")
    original = keras_trainer.Trainer.compile
    optimizers.install([lever], lambda *_: None)
    try:
        now = model(keras.optimizers.Adam(0.5, use_ema=ema))
    finally:
        keras_trainer.Trainer.compile = original
    now.optimizer.build(now.trainable_variables)
    said: list[str] = []

    def restore(found: Any, checkpoint: Any) -> None:
        done = checkpointing.restore(
            found, *checkpoint, lambda _, text: said.append(text)
        )
        assert done

    restore(now, before)
    shared = 2 + (len(now.trainable_variables) if ema else 0)
    for one, other in zip(plain.variables, now.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    for index in range(shared):
        one, other = plain.optimizer.variables[index], now.optimizer.variables[index]
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert all(not np.any(v.numpy()) for v in now.optimizer.variables[shared:])
    assert f"{lever}" not in said[0]
    assert "left behind" in said[0]
    assert int(now.optimizer.iterations) == 12
    trained(now)

    after = saved(now, tmp_path / "now")
    back = model(keras.optimizers.Adam(0.5, use_ema=ema))
    back.optimizer.build(back.trainable_variables)
    restore(back, after)
    for one, other in zip(now.variables, back.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert int(back.optimizer.iterations) == 24
    assert all(not np.any(v.numpy()) for v in back.optimizer.variables[shared:])
    # What the same optimizer has written goes on whole.
    said.clear()
    restore(now, after)
    assert not said


@pytest.mark.parametrize("pulled", ["optimizer_sgd"], indirect=True)
def test_another_model_is_not_taken_for_another_optimizer(
    pulled: str, tmp_path: Path
) -> None:
    found = model(keras.optimizers.Adam())
    trained(found)
    state, arrays = saved(found, tmp_path)
    state["optimizer"] = {**state["optimizer"], "lever": ""}
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    other.optimizer.build(other.trainable_variables)
    assert not checkpointing.restore(other, state, arrays, lambda *_: None)
    with pytest.raises(checkpointing.CheckpointError, match="the script has changed"):
        checkpointing.restore(other, state, arrays, lambda *_: None, whole=True)


# Keras 3.15 makes it of NumPy 2, and warns itself that slots do not fit.
@pytest.mark.filterwarnings("ignore")
@every
def test_a_saved_model_needs_no_oomrun(pulled: str, tmp_path: Path) -> None:
    found = model(keras.optimizers.Adam(0.01))
    weights = trained(found)
    found.save(tmp_path / "model.keras")
    config = found.get_compile_config()["optimizer"]
    assert config["module"] == "keras.optimizers"
    assert config["registered_name"] is None
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one, other in zip(weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(one, other.numpy())


@every
def test_what_is_trained_so_has_a_key_of_its_own(pulled: str) -> None:
    found = model(keras.optimizers.Adam(0.01))
    trained(found, 1)
    spec = [tf.TensorSpec((8, 8)), tf.TensorSpec((8, 1))]
    assert model_key.key_of(found, spec) is not None
