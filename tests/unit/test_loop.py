"""``oomrun.Loop`` against a loop written by hand, whole and in micro-batches.

In process with TensorFlow, in float64, with a real session. Covers the mathematics and
the rules of use; going on after a restart is in ``test_loop_resume.py``, running out of
memory in ``tests/e2e/test_custom_loop.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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

BATCH = 6


pytestmark = pytest.mark.usefixtures("float64")


@dataclass
class Task:
    """A loop's parts; what is trained is by default all that can be."""

    loss: Callable[[Any], Any]
    state: list[Any]
    optimizer: Any = field(default_factory=lambda: keras.optimizers.Adam(0.05))
    variables: list[Any] | None = None

    def weights(self) -> list[Any]:
        models = [t for t in self.state if isinstance(t, keras.Layer)]
        return [w for m in self.variables or models for w in m.trainable_variables]

    def results(self) -> list[float]:
        metrics = [t for t in self.state if isinstance(t, keras.Metric)]
        return [float(metric.result()) for metric in metrics]

    def variables_now(self) -> list[np.ndarray[Any, Any]]:
        found = [v for t in [*self.state, self.optimizer] for v in loops.variables(t)]
        return [tf.convert_to_tensor(v).numpy().copy() for v in found]


Outcome = tuple[list[float], list[float], list[np.ndarray[Any, Any]]]


def by_hand(make: Callable[[], Task], data: list[Any]) -> Outcome:
    """The loop as a script without oomrun would have it."""
    keras.utils.set_random_seed(1)
    task = make()
    values = []
    for batch in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.loss(tensors(batch)))
            scaled = task.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, task.weights())
        task.optimizer.apply_gradients(zip(gradients, task.weights(), strict=True))
        values.append(float(loss))
    return values, task.results(), task.variables_now()


def by_loop(make: Callable[[], Task], data: list[Any]) -> Outcome:
    keras.utils.set_random_seed(1)
    task = make()
    loop = oomrun.Loop(task.loss, task.optimizer, task.state, task.variables)
    return train(loop, data), task.results(), task.variables_now()


def train(loop: oomrun.Loop, data: list[Any]) -> list[float]:
    """One epoch; the losses of its steps."""
    losses: list[float] = []
    for _ in loop.epochs(1):
        losses += [float(loop.step(batch)) for batch in loop.batches(data)]
    return losses


def tensors(batch: Any) -> Any:
    return keras.tree.map_structure(tf.convert_to_tensor, batch)


def assert_same(found: Outcome, wanted: Outcome, tolerance: float = 1e-10) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    assert found[1] == pytest.approx(wanted[1], rel=tolerance)
    for a, b in zip(found[2], wanted[2], strict=True):
        assert np.abs(a - b).max(initial=0) <= tolerance * max(np.linalg.norm(b), 1e-3)


# --- tasks ----------------------------------------------------------------------------

rng = np.random.default_rng(0)
FLAT = [(rng.normal(size=(n, 4)), rng.integers(0, 3, size=n)) for n in (6, 4)]


def token_data(*sizes: int, times: int = 5) -> list[Any]:
    rng = np.random.default_rng(3)
    data = []
    for size in sizes:
        x = rng.integers(1, 7, size=(size, times))
        x[np.arange(times) >= rng.integers(1, times + 1, size=(size, 1))] = 0
        weights = rng.uniform(size=(size, times))
        data.append((x, rng.integers(0, 4, size=(size, times)), weights))
    return data


TOKENS = token_data(6, 4)


def dense(**options: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, "tanh", **options),
            layers.Dense(3, activation="softmax"),
        ]
    )


def tagger(kind: Any = layers.LSTM) -> Any:
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            kind(3, return_sequences=True),
            layers.Dense(4, activation="softmax"),
        ]
    )


def crossentropy(y: Any, predictions: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, predictions)


def by_sample() -> Task:
    model, accuracy = dense(), keras.metrics.SparseCategoricalAccuracy()

    def loss(batch: Any) -> Any:
        x, y = batch
        predictions = model(x, training=True)
        accuracy.update_state(y, predictions)
        return crossentropy(y, predictions)

    return Task(loss, [model, accuracy])


def reduced(reduce: Callable[..., Any]) -> Callable[[], Task]:
    """A scalar loss of labels, predictions and a loss object of Keras's."""

    def make() -> Task:
        model = dense()

        def loss(batch: Any) -> Any:
            x, y = batch
            return reduce(y, model(x, training=True))

        return Task(loss, [model], keras.optimizers.SGD(0.02, momentum=0.9))

    return make


def keras_loss(reduction: Any, *, weighted: bool = False) -> Callable[[], Task]:
    """A loss object of Keras's, on masked sequences."""

    def make() -> Task:
        model = tagger()
        function = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        seen = keras.metrics.Sum()

        def loss(batch: Any) -> Any:
            x, y, weights = batch
            seen.update_state(tf.ones_like(weights))
            return function(y, model(x), weights if weighted else None)

        return Task(loss, [model, seen])

    return make


def values_of_steps() -> Task:
    """A value for each time step of each sample, and a sparse gradient."""
    model = tagger(layers.GRU)
    return Task(lambda batch: crossentropy(batch[1], model(batch[0])), [model])


class Unbuilt(keras.Model):
    """Has no variables before its first call; one weight takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers.Dense(3, "softmax"), layers.Dense(3)

    def call(self, x: Any) -> Any:
        self.unused(x)
        return self.used(x)


def unbuilt() -> Task:
    model, score = Unbuilt(), keras.metrics.F1Score("macro")

    def loss(batch: Any) -> Any:
        predictions = model(batch[0])
        score.update_state(tf.one_hot(batch[1], 3, dtype="float64"), predictions)
        return crossentropy(batch[1], predictions)

    return Task(loss, [model, score], keras.optimizers.SGD(0.1))


def regularised() -> Task:
    model = dense(kernel_regularizer="l2", activity_regularizer="l1")

    def loss(batch: Any) -> Any:
        value = tf.reduce_mean(crossentropy(batch[1], model(batch[0])))
        return value + tf.add_n(model.losses)

    return Task(loss, [model], keras.optimizers.SGD(0.1, global_clipnorm=0.05))


def second_half() -> Task:
    """Two models, of which one is trained, and a variable that counts."""
    first = keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh")])
    last = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    rows = tf.Variable(0, trainable=False)

    def loss(batch: Any) -> Any:
        rows.assign_add(tf.shape(batch[0])[0])
        return crossentropy(batch[1], last(first(batch[0])))

    return Task(loss, [first, last, rows], variables=[last])


def branches() -> Task:
    """Plain Python control flow over tensors, as ``tf.function`` takes it."""
    model = dense()

    def loss(batch: Any) -> Any:
        x, y = batch
        value = crossentropy(y, model(x))
        if tf.reduce_sum(tf.ones_like(value)) > 100.0:
            value = value * 2.0
        for _ in tf.range(2):
            value = value * 1.5
        return value

    return Task(loss, [model])


def averaged() -> Task:
    """A scalar loss, which a metric averages over batches."""
    model, average = dense(), keras.metrics.Mean("average")

    def loss(batch: Any) -> Any:
        value = tf.reduce_mean(crossentropy(batch[1], model(batch[0])))
        average.update_state(value)
        return value

    return Task(loss, [model, average])


def keras_sum(y: Any, predictions: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(reduction="sum")(y, predictions)


def keras_values(y: Any, predictions: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(reduction=None)(y, predictions)


def count(y: Any) -> Any:
    return tf.cast(tf.shape(y)[0], "float64")


TASKS: dict[str, tuple[Callable[[], Task], list[Any]]] = {
    "a value for each sample": (by_sample, FLAT),
    "mean": (averaged, FLAT),
    "sum": (reduced(lambda y, p: tf.reduce_sum(crossentropy(y, p))), FLAT),
    "Keras's sum": (reduced(keras_sum), FLAT),
    "Keras's sum over a constant": (reduced(lambda y, p: keras_sum(y, p) / 6.0), FLAT),
    "Keras's sum over the count": (
        reduced(lambda y, p: keras_sum(y, p) / count(y)),
        FLAT,
    ),
    "Keras's values, summed": (
        reduced(lambda y, p: tf.reduce_sum(keras_values(y, p))),
        FLAT,
    ),
    "Keras's values, averaged": (
        reduced(lambda y, p: tf.reduce_mean(keras_values(y, p))),
        FLAT,
    ),
    "masked": (keras_loss("sum_over_batch_size"), TOKENS),
    "masked sum": (keras_loss("sum"), TOKENS),
    "masked and weighted": (
        keras_loss("mean_with_sample_weight", weighted=True),
        TOKENS,
    ),
    "values of steps": (values_of_steps, TOKENS),
    "unbuilt": (unbuilt, FLAT),
    "regularised": (regularised, FLAT),
    "one of two models": (second_half, FLAT),
    "branches": (branches, FLAT),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("name", TASKS)
def test_a_loop_is_the_loop_written_by_hand(name: str, tmp_path: Path) -> None:
    make, data = TASKS[name]
    wanted = by_hand(make, data)
    assert_same(by_loop(make, data), wanted)
    # 4 leaves a smaller last pass; whole and one by one are tried with one task.
    for micro in (4, BATCH, 1) if name == "a value for each sample" else (4,):
        with loops.worker(tmp_path / str(micro), micro_batch_fixed=micro) as events:
            assert_same(by_loop(make, data), wanted)
        assert not [e for e in events if isinstance(e, ev.Noted)], micro
        begun, ended = (
            next(e for e in events if isinstance(e, kind))
            for kind in (ev.FitStarted, ev.FitEnded)
        )
        assert begun.micro_batch_size == micro
        assert (ended.step, ended.samples) == (len(data), sum(len(d[0]) for d in data))


def contrastive() -> Task:
    model = dense()

    def loss(batch: Any) -> Any:
        embedded = model(batch[0])
        return crossentropy(
            tf.range(tf.shape(embedded)[0]), embedded @ tf.transpose(embedded)
        )

    return Task(loss, [model])


def test_values_that_depend_on_other_samples_are_not_cut(tmp_path: Path) -> None:
    wanted = by_hand(contrastive, FLAT)
    with loops.worker(tmp_path, micro_batch_fixed=2) as events:
        assert_same(by_loop(contrastive, FLAT), wanted)
    (note,) = [e for e in events if isinstance(e, ev.Noted)]
    assert note.code == "not-separable"
    assert "compares samples" in note.text


def counting(*, passes: bool) -> Callable[[], Task]:
    """A metric, or a variable, of which the parts' are not the batch's."""

    def make() -> Task:
        model, largest = dense(), keras.metrics.Sum("largest")
        calls = tf.Variable(0.0, trainable=False, name="calls", dtype="float64")

        def loss(batch: Any) -> Any:
            values = crossentropy(batch[1], model(batch[0]))
            largest.update_state(tf.reduce_max(values))
            calls.assign_add(1.0 if passes else 0.0)
            return values

        return Task(loss, [model, largest, calls])

    return make


def test_what_differs_in_micro_batches_is_said(tmp_path: Path) -> None:
    for passes, code in [(False, "metrics-of-micro-batches"), (True, "not-separable")]:
        with loops.worker(tmp_path / code, micro_batch_fixed=4) as events:
            by_loop(counting(passes=passes), FLAT)
        (note,) = [e for e in events if isinstance(e, ev.Noted)]
        assert note.code == code
        assert ("calls" if passes else "largest") in note.text


def unfollowable(*, scalar: bool) -> Callable[[], Task]:
    def make() -> Task:
        model = dense()
        numbers = np.random.default_rng()

        def loss(batch: Any) -> Any:
            drawn = tf.numpy_function(lambda: numbers.uniform(), [], "float64")
            drawn.set_shape([])
            values = crossentropy(batch[1], model(batch[0])) * (1.0 + drawn)
            return tf.reduce_mean(values) if scalar else values

        return Task(loss, [model])

    return make


@pytest.mark.parametrize(
    ("scalar", "code"), [(True, "not-separable"), (False, "random-loss")]
)
def test_what_cannot_be_tried_is_said(scalar: bool, code: str, tmp_path: Path) -> None:
    with loops.worker(tmp_path, micro_batch_fixed=2) as events:
        by_loop(unfollowable(scalar=scalar), FLAT)
    assert [e.code for e in events if isinstance(e, ev.Noted)] == [code]


def normalised() -> Task:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.BatchNormalization(),
            layers.Dense(8, "relu"),
            layers.Dropout(0.5),
            layers.Dense(3, "softmax"),
        ]
    )
    return Task(
        lambda batch: crossentropy(batch[1], model(batch[0], training=True)), [model]
    )


def test_batch_norm_and_dropout_are_cut_with_a_note(tmp_path: Path) -> None:
    wanted = by_hand(normalised, FLAT)
    assert_same(by_loop(normalised, FLAT), wanted)
    with loops.worker(tmp_path / "whole"):
        assert_same(by_loop(normalised, FLAT), wanted)
    with loops.worker(tmp_path / "cut", micro_batch_fixed=3) as events:
        losses, _, _ = by_loop(normalised, FLAT)
    assert np.isfinite(losses).all()
    codes = [e.code for e in events if isinstance(e, ev.Noted)]
    assert codes == ["batch-norm", "random-layers"]
    refused = {"micro_batch_fixed": 3, "batch_norm": "refuse"}
    with loops.worker(tmp_path / "refused", **refused) as events:
        assert_same(by_loop(normalised, FLAT), wanted)
    assert [e.code for e in events if isinstance(e, ev.Noted)] == ["not-separable"]


def scaled() -> Task:
    model = dense()
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
    return Task(
        lambda batch: crossentropy(batch[1], model(batch[0])), [model], optimizer
    )


def test_mixed_precision_scales_the_loss(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    wanted = by_hand(scaled, FLAT)
    assert_same(by_loop(scaled, FLAT), wanted, tolerance=1e-3)
    with loops.worker(tmp_path, micro_batch_fixed=2):
        assert_same(by_loop(scaled, FLAT), wanted, tolerance=5e-3)
    bad = [(FLAT[0][0] * np.inf, FLAT[0][1])]
    keras.utils.set_random_seed(1)
    task = scaled()
    with loops.worker(tmp_path / "bad", micro_batch_fixed=2):
        train(oomrun.Loop(task.loss, task.optimizer, task.state), bad)
    assert float(task.optimizer.dynamic_scale) == 2.0**7
    assert all(np.isfinite(w).all() for w in task.state[0].get_weights())


def test_other_sizes_and_lengths_are_not_traced_again(tmp_path: Path) -> None:
    model, traces = tagger(layers.GRU), 0

    def loss(batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return crossentropy(batch[1], model(batch[0]))

    after: list[int] = []
    with loops.worker(tmp_path, micro_batch_max=4) as _:
        loop = oomrun.Loop(loss, keras.optimizers.SGD(0.1), [model])
        for _ in loop.epochs(1):
            for times in (5, 7, 4, 9, 3, 8, 6):
                for batch in loop.batches(token_data(6, 5, 7, 3, 4, times=times)):
                    loop.step(batch[:2])
                after.append(traces)
    assert after[2:] == after[2:3] * 5


# --- rules of use ---------------------------------------------------------------------


def small() -> oomrun.Loop:
    task = by_sample()
    return oomrun.Loop(task.loss, task.optimizer, task.state)


def test_what_is_not_in_order_is_refused(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with loops.worker(folder) if folder else loops.alone():
            loop, other = small(), small()
            with pytest.raises(RuntimeError, match="outside of loop"):
                loop.batches(FLAT)
            with pytest.raises(RuntimeError, match="outside of loop"):
                loop.step(FLAT[0])
            for _ in loop.epochs(1):
                with pytest.raises(RuntimeError, match="within another loop"):
                    next(other.epochs(1))
                with pytest.raises(RuntimeError, match="outside of loop"):
                    loop.step(FLAT[0])
                late = loop.batches(FLAT)
                for _ in loop.batches(FLAT):
                    with pytest.raises(RuntimeError, match=r"within loop\.batches"):
                        next(loop.batches(FLAT))
            with pytest.raises(RuntimeError, match="after its epoch has ended"):
                next(late)
            # All of it is over: the next one may begin.
            assert list(other.epochs(2)) == [0, 1]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda values: (values, 1), "it returned tuple"),
        (lambda values: None, "it returned NoneType"),
        (lambda values: values[:-1], "one value for each sample"),
    ],
)
def test_other_results_of_a_loss_are_refused(
    result: Callable[[Any], Any], text: str
) -> None:
    model = dense()
    loop = oomrun.Loop(
        lambda batch: result(crossentropy(batch[1], model(batch[0]))),
        keras.optimizers.SGD(0.1),
        [model],
    )
    with pytest.raises((TypeError, ValueError), match=text):
        train(loop, FLAT)


def test_objects_of_other_kinds_are_refused() -> None:
    model, optimizer = dense(), keras.optimizers.SGD(0.1)
    loss = by_sample().loss
    with pytest.raises(TypeError, match="which has no variables"):
        oomrun.Loop(loss, optimizer, state=[model, "accuracy"])
    with pytest.raises(TypeError, match="must be a Keras optimizer"):
        oomrun.Loop(loss, "sgd", state=[model])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a function"):
        oomrun.Loop(model.layers, optimizer)  # type: ignore[arg-type]
    loop = oomrun.Loop(loss, optimizer)
    with pytest.raises(ValueError, match="nothing to train"):
        train(loop, FLAT)
    with pytest.raises(TypeError, match=r"values\['best'\] cannot be kept.*Dense"):
        loop.values["best"] = model.layers[0]
    loop.values.update(best=1.5, history=[1, 2], shape=(3, None))
    assert dict(loop.values) == {"best": 1.5, "history": [1, 2], "shape": (3, None)}


def test_devices_and_strategy() -> None:
    loop = small()
    assert [device.name for device in loop.devices] == ["/device:CPU:0"]
    assert loop.devices[0].limit_bytes is None
    assert loop.strategy is tf.distribute.get_strategy()
