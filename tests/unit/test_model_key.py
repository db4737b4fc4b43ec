"""The key of a training: small changes that must change it, and some that must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

from oomrun.worker.model_key import key_of, key_of_loop

SPEC = (
    tf.TensorSpec((None, 8, 8, 3), tf.float32),
    tf.TensorSpec((None,), tf.int64),
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


# -- models of Keras's layers --------------------------------------------------


def _functional(
    *,
    filters: int = 4,
    kernel: int = 3,
    padding: str = "same",
    strides: int = 1,
    activation: Any = "relu",
    use_bias: bool = True,
    join: str = "add",
    crossed: bool = False,
    scale: float = 2.0,
    rate: float = 0.2,
    regularizer: Any = None,
    extra: Any = None,
    trainable: bool = True,
    dtype: Any = None,
    size: int | None = 8,
    names: str = "",
    seed: int | None = 1,
    **options: Any,
) -> Any:
    inputs = keras.Input((size, size, 3))
    first = kl.Conv2D(
        filters, kernel, padding=padding, strides=strides, activation=activation,
        use_bias=use_bias, kernel_regularizer=regularizer, dtype=dtype,
        name=f"{names}first" if names else None,
    )  # fmt: skip
    first.trainable = trainable
    a = first(inputs)
    b = kl.Conv2D(filters, kernel, padding=padding, strides=strides)(inputs)
    c = kl.Activation("tanh")(a if not crossed else b)
    d = kl.Activation("sigmoid")(b if not crossed else a)
    x = kl.Add()([c, d]) if join == "add" else kl.Multiply()([c, d])
    x = keras.ops.relu(x * scale)
    if extra is not None:
        x = extra(x)
    x = kl.Dropout(rate, seed=seed)(x)
    x = kl.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, kl.Dense(10)(x))
    return _compiled(model, **options)


def _compiled(model: Any, **options: Any) -> Any:
    given = {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "jit_compile": False,
    }
    model.compile(**{**given, **options})
    return model


def _own_activation(x: Any) -> Any:
    return keras.ops.tanh(x) + 1


def _other_activation(x: Any) -> Any:
    return keras.ops.tanh(x) + 2


def _own_loss(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(p), axis=-1)


def _adam(**options: Any) -> Any:
    return keras.optimizers.Adam(**options)


CHANGES: dict[str, dict[str, Any]] = {
    "filters": {"filters": 5},
    "kernel size": {"kernel": 5},
    "padding": {"padding": "valid"},
    "strides": {"strides": 2},
    "activation": {"activation": "gelu"},
    "no activation": {"activation": None},
    "own activation": {"activation": _own_activation},
    "other own activation": {"activation": _other_activation},
    "bias": {"use_bias": False},
    "another merge": {"join": "multiply"},
    "inputs of two layers exchanged": {"crossed": True},
    "a number in the graph": {"scale": 3.0},
    "dropout rate": {"rate": 0.0},
    "regularizer": {"regularizer": "l2"},
    "one more layer": {"extra": kl.BatchNormalization},
    "layer of no weights": {"extra": kl.ReLU},
    "lambda": {"extra": lambda: kl.Lambda(lambda x: x * 2)},
    "other lambda": {"extra": lambda: kl.Lambda(lambda x: x * 3)},
    "frozen layer": {"trainable": False},
    "dtype of a layer": {"dtype": "float64"},
    "mixed precision of a layer": {"dtype": "mixed_bfloat16"},
    "unknown image size": {"size": None},
    "optimizer": {"optimizer": lambda: keras.optimizers.RMSprop(1e-3)},
    "slots of the optimizer": {"optimizer": lambda: _adam(amsgrad=True)},
    "ema": {"optimizer": lambda: _adam(use_ema=True)},
    "clipping": {"optimizer": lambda: _adam(global_clipnorm=1.0)},
    "accumulation": {"optimizer": lambda: _adam(gradient_accumulation_steps=2)},
    "loss scaling": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_adam())},
    "loss": {"loss": "sparse_categorical_crossentropy"},
    "own loss": {"loss": _own_loss},
    "loss weights": {"loss_weights": [2.0]},
    "no metrics": {"metrics": None},
    "another metric": {"metrics": [keras.metrics.SparseTopKCategoricalAccuracy]},
    "weighted metrics": {"weighted_metrics": ["accuracy"]},
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps per execution": {"steps_per_execution": 4},
}

SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": {"names": "my_"},
    "seed": {"seed": 7},
    "learning rate": {"optimizer": lambda: _adam(learning_rate=0.5)},
    "learning rate schedule": {
        "optimizer": lambda: _adam(
            learning_rate=keras.optimizers.schedules.ExponentialDecay(1.0, 5, 0.9)
        )
    },
    "name of the optimizer": {"optimizer": lambda: _adam(name="mine")},
}


def _made(options: dict[str, Any]) -> Any:
    """The model, its layers, optimizers and metrics made anew."""
    made = dict(options)
    for name in ("extra", "optimizer"):
        if name in made:
            made[name] = made[name]()
    if isinstance(made.get("metrics"), list):
        made["metrics"] = [metric() for metric in made["metrics"]]
    return _functional(**made)


def test_no_two_of_these_changes_have_one_key() -> None:
    keys = {"": key_of(_functional(), SPEC)}
    keys |= {name: key_of(_made(change), SPEC) for name, change in CHANGES.items()}
    assert [name for name, key in keys.items() if key is None] == []
    groups: dict[str | None, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    assert [names for names in groups.values() if len(names) > 1] == []


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_costs_no_memory_does_not_change_the_key(change: dict[str, Any]) -> None:
    key = key_of(_functional(), SPEC)
    kl.Dense(3), kl.Conv2D(3, 3), kl.Dense(4)  # the next names have other numbers
    assert key is not None
    assert key_of(_made(change), SPEC) == key


def test_training_does_not_change_the_key() -> None:
    model = _functional()
    key = key_of(model, SPEC)
    x, y = np.ones((4, 8, 8, 3), "float32"), np.arange(4)
    model.fit(x, y, batch_size=2, verbose=0)
    assert key_of(model, SPEC) == key
    assert key_of(model, (tf.constant(x), tf.constant(y))) == key


@pytest.mark.parametrize(
    "spec",
    [
        (tf.TensorSpec((None, 8, 8, 3), tf.float16), SPEC[1]),
        (tf.TensorSpec((None, 8, 9, 3)), SPEC[1]),
        (tf.TensorSpec((None, None, None, 3)), SPEC[1]),
        (tf.TensorSpec(None), SPEC[1]),
        (SPEC[0], tf.TensorSpec((None, 1), tf.int64)),
        (*SPEC, tf.TensorSpec((None,))),
        (*SPEC, None),
        list(SPEC),
        ({"a": SPEC[0]}, SPEC[1]),
        ({"b": SPEC[0]}, SPEC[1]),
        (tf.RaggedTensorSpec((None, None, 8, 3), ragged_rank=1), SPEC[1]),
        (tf.SparseTensorSpec((None, 8, 8, 3)), SPEC[1]),
    ],
)
def test_a_batch_of_another_kind_has_another_key(spec: Any) -> None:
    model = _functional()
    assert key_of(model, spec) not in (None, key_of(model, SPEC))


@pytest.mark.parametrize("size", [None, 1, 64])
def test_the_number_of_samples_is_not_in_the_key(size: int | None) -> None:
    model = _functional()
    spec = (tf.TensorSpec((size, 8, 8, 3)), tf.TensorSpec((size,), tf.int64))
    assert key_of(model, spec) == key_of(model, SPEC)


def test_a_batch_that_is_no_tensor_has_no_key() -> None:
    spec = (tf.data.DatasetSpec(tf.TensorSpec(())), SPEC[1])
    assert key_of(_functional(), spec) is None


def test_settings_for_the_whole_process_are_in_the_key() -> None:
    keys = [key_of(_functional(), SPEC)]
    keras.config.set_dtype_policy("mixed_bfloat16")
    keys.append(key_of(_functional(), SPEC))
    keras.config.set_dtype_policy("float32")
    before = tf.config.optimizer.get_jit()
    tf.config.optimizer.set_jit("autoclustering")
    try:
        keys.append(key_of(_functional(), SPEC))
    finally:
        tf.config.optimizer.set_jit(before or False)
    assert tf.config.optimizer.get_jit() == before
    assert len({*keys, None}) == 4


def _sequential(*layers: Any) -> Any:
    return _compiled(keras.Sequential([keras.Input((8, 8, 3)), *layers]))


class _Cell(keras.Layer):
    def __init__(self, units: int, factor: int) -> None:
        super().__init__()
        self.units = self.state_size = units
        self.factor = factor
        self.inner = kl.Dense(units)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any, states: Any) -> Any:
        new = self.inner(x) * self.factor + states[0]
        return new, [new]


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (lambda: kl.Reshape((8, 24)), lambda: kl.Reshape((24, 8))),
        (lambda: kl.MaxPool2D(2), lambda: kl.AveragePooling2D(2)),
        (
            lambda: kl.TimeDistributed(kl.LSTM(3)),
            lambda: kl.TimeDistributed(kl.LSTM(3, return_sequences=True)),
        ),
        (
            lambda: kl.TimeDistributed(kl.RNN(_Cell(3, 1))),
            lambda: kl.TimeDistributed(kl.RNN(_Cell(3, 2))),
        ),
        (
            lambda: kl.TimeDistributed(kl.RNN(_Cell(3, 1))),
            lambda: kl.TimeDistributed(kl.RNN(_Cell(3, 1), unroll=True)),
        ),
        (
            lambda: kl.TimeDistributed(kl.Bidirectional(kl.GRU(3))),
            lambda: kl.TimeDistributed(kl.Bidirectional(kl.GRU(3, dropout=0.5))),
        ),
        (lambda: kl.Rescaling(1.0), lambda: kl.Rescaling(2.0)),
        (lambda: kl.UpSampling2D(2), lambda: kl.UpSampling2D(3)),
    ],
)
def test_layers_that_differ_in_their_settings_alone(one: Any, another: Any) -> None:
    first = key_of(_sequential(one(), kl.Flatten()), SPEC)
    assert first is not None
    assert key_of(_sequential(one(), kl.Flatten()), SPEC) == first
    assert key_of(_sequential(another(), kl.Flatten()), SPEC) not in (None, first)


def test_layer_names_are_not_taken_for_settings() -> None:
    """Where names were replaced as text, ``relu`` and ``tanh`` would be one."""
    keys = set()
    for activation in ("relu", "tanh"):
        layer = kl.Conv2D(3, 3, activation=activation, name=activation)
        keys.add(key_of(_sequential(layer, kl.Flatten()), SPEC))
    assert len({*keys, None}) == 3


def test_a_shared_layer_is_not_two_layers() -> None:
    def model(shared: bool) -> Any:
        inputs = [keras.Input((8,)), keras.Input((8,))]
        layer = kl.Dense(8)
        both = [layer(inputs[0]), (layer if shared else kl.Dense(8))(inputs[1])]
        return _compiled(keras.Model(inputs, kl.Dense(1)(kl.Concatenate()(both))))

    keys = [key_of(model(shared), SPEC) for shared in (True, True, False)]
    assert keys[0] == keys[1]
    assert len({*keys, None}) == 3


def test_a_layer_whose_call_was_replaced_has_another_key() -> None:
    model = _functional()
    key = key_of(model, SPEC)
    layer = model.layers[1]
    layer.call = lambda x: x
    assert key_of(model, SPEC) not in (None, key)


@pytest.mark.parametrize("part", ["regularizer", "constraint"])
def test_what_a_weight_of_an_own_layer_is_held_by_counts(part: str) -> None:
    class Own(keras.Layer):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.weight = self.add_weight(shape=(3,), **{part: held})

        def call(self, x: Any) -> Any:
            return x * self.weight

    kind = {"regularizer": keras.regularizers.L2, "constraint": None}[part]
    made = kind or (lambda limit: keras.constraints.MaxNorm(limit))
    keys = [
        key_of(_sequential(Own(held), kl.Flatten()), SPEC)
        for held in (None, made(1.0), made(1.0), made(2.0))
    ]
    assert keys[1] == keys[2]
    assert len({*keys, None}) == 4


# -- custom loops --------------------------------------------------------------


def _loop(
    *,
    factor: float = 1.0,
    frozen: bool = False,
    slots: bool = False,
    squared: bool = True,
) -> Any:
    model = keras.Sequential([keras.Input((4,)), kl.Dense(3), kl.Dense(1)])
    model.squared = squared
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9 if slots else 0.0)

    def loss(batch: Any) -> Any:
        x, y = batch
        error = model(x, training=True)[:, 0] - y
        return (tf.square(error) if model.squared else tf.abs(error)) * factor

    context = tf.__internal__.autograph.control_status_ctx()
    converted = tf.__internal__.autograph.tf_convert(loss, context)
    trained = model.layers[1].variables if frozen else model.trainable_variables
    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None,)))
    return key_of_loop(converted, [model, optimizer], trained, spec)


def test_loops_have_keys_of_their_loss_and_of_what_they_train() -> None:
    assert _loop() is not None
    assert _loop() == _loop()
    changed = [
        _loop(factor=2.0),
        _loop(frozen=True),
        _loop(slots=True),
        _loop(squared=False),
    ]
    assert len({_loop(), *changed, None}) == 6
