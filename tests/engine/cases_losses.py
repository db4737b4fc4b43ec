"""Rows: losses, weights of samples and classes, masks, regularisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from engine.registry import row, section
from engine.samples import (
    COUNT,
    array,
    classes,
    classifier,
    compiled,
    dataset,
    dense,
    fit,
    regression,
    tagger,
    tokens,
    two_data,
    two_outputs,
    weights,
)

section("Losses and weights")


@row("loss as a string, an alias")
def loss_string(folder: Path) -> Any:
    model = compiled(loss="mae")
    return fit(model, *regression()), model


@row("loss as an object with options", slow=True)
def loss_object(folder: Path) -> Any:
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1, from_logits=True)
    model = dense(3)
    model.compile("adam", loss)
    x, y = classes()
    return fit(model, x, np.eye(3)[y]), model


@row("loss as a function, one value a sample", slow=True)
def loss_function(folder: Path) -> Any:
    def loss(y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p) ** 1.5, axis=-1)

    model = compiled("adam", loss)
    return fit(model, *regression(), sample_weight=weights()), model


@row("loss as a function, a mean over the batch")
def loss_function_mean(folder: Path) -> Any:
    model = compiled("adam", lambda y, p: ops.mean(ops.square(y - p)))
    return fit(model, *regression()), model


@row("loss as a function, a sum over the batch")
def loss_function_sum(folder: Path) -> Any:
    model = compiled("sgd", lambda y, p: ops.sum(ops.abs(y - p)) / 50)
    return fit(model, *regression()), model


@row("a loss class of the user's (`keras.losses.Loss`)", slow=True)
def loss_class(folder: Path) -> Any:
    class Cubed(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y: Any, p: Any) -> Any:
            return ops.mean(ops.abs(y - p) ** 3, axis=-1)

    model = compiled("adam", Cubed())
    return fit(model, *regression()), model


@row(
    "a loss that compares samples of a batch (contrastive)",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
)
def loss_contrastive(folder: Path) -> Any:
    def loss(y: Any, p: Any) -> Any:
        p = ops.normalize(p, axis=-1)
        alike = ops.matmul(p, ops.transpose(p)) / 0.5
        return keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(p)[0]), alike, from_logits=True
        )

    model = compiled("adam", loss)
    return fit(model, *regression()), model


@row(
    "a loss that is no mean over samples (root of the mean squared error)",
    notes=("not-separable",),
    cuts=False,
    tolerance=0,
    slow=True,
)
def loss_root(folder: Path) -> Any:
    model = compiled("adam", lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))))
    return fit(model, *regression()), model


def _reduced(reduction: str, masked: bool) -> Any:
    """Weighted in training and in validation, then not."""
    if masked:
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
        model, (x, y) = tagger(loss), tokens()
        given = weights(COUNT, 5)
    else:
        model, (x, y) = compiled("adam", _mse(reduction)), regression()
        given = weights()
    history = fit(model, x, y, sample_weight=given, validation_data=(x, y, given))
    return history, model, fit(model, x, y, epochs=1), model


def _mse(reduction: str) -> Any:
    return keras.losses.MeanSquaredError(reduction=reduction)


@row("reduction `sum_over_batch_size`, with and without weights")
def reduction_default(folder: Path) -> Any:
    return _reduced("sum_over_batch_size", masked=False)


@row("reduction `sum`", slow=True)
def reduction_sum(folder: Path) -> Any:
    return _reduced("sum", masked=False)


@row("reduction `mean`", slow=True)
def reduction_mean(folder: Path) -> Any:
    return _reduced("mean", masked=False)


@row("reduction `mean_with_sample_weight`", slow=True)
def reduction_weighted(folder: Path) -> Any:
    return _reduced("mean_with_sample_weight", masked=False)


@row("reduction `none`")
def reduction_none(folder: Path) -> Any:
    model = compiled(keras.optimizers.SGD(0.001), _mse("none"))
    return fit(model, *regression()), model


@row("reduction `none`, with a mean taken in `compute_loss`")
def reduction_own(folder: Path) -> Any:
    class Reduced(keras.Model):  # type: ignore[misc]
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return ops.mean(_mse("none")(y, y_pred))

    x = keras.Input((4,))
    model = Reduced(x, layers.Dense(2)(x))
    model.compile("adam")
    return fit(model, *regression()), model


@row("masks: reduction `sum_over_batch_size`, with and without weights")
def masked_default(folder: Path) -> Any:
    return _reduced("sum_over_batch_size", masked=True)


@row("masks: reduction `sum`", slow=True)
def masked_sum(folder: Path) -> Any:
    return _reduced("sum", masked=True)


@row("masks: reduction `mean_with_sample_weight`", slow=True)
def masked_weighted(folder: Path) -> Any:
    return _reduced("mean_with_sample_weight", masked=True)


@row("`sample_weight` as an array")
def sample_weight(folder: Path) -> Any:
    model = compiled("adam", metrics=["mae"], weighted_metrics=["mae"])
    return fit(model, *regression(), sample_weight=weights()), model


@row("`sample_weight` in `tf.data`", slow=True)
def sample_weight_dataset(folder: Path) -> Any:
    model = compiled("adam", weighted_metrics=["mse"])
    return fit(model, dataset(*regression(), weights())), model


@row("`sample_weight` for each output, as a dict")
def sample_weight_dict(folder: Path) -> Any:
    model = two_outputs()
    model.compile("adam", {"p": "mse", "q": "mse"}, weighted_metrics={"q": ["mae"]})
    given = {"p": weights(), "q": weights()[::-1].copy()}
    return fit(model, *two_data(), sample_weight=given), model


@row("`class_weight`")
def class_weight(folder: Path) -> Any:
    model = classifier(weighted_metrics=["accuracy"])
    return fit(model, *classes(), class_weight={0: 1.0, 1: 3.0, 2: 0.5}), model


@row("`loss_weights` as a dict")
def loss_weights_dict(folder: Path) -> Any:
    model = two_outputs()
    losses = {"p": "mae", "q": keras.losses.BinaryCrossentropy()}
    model.compile("adam", losses, loss_weights={"p": 0.3, "q": 2.0})
    return fit(model, *two_data()), model


@row("`loss_weights` as a list; an output without a loss", slow=True)
def loss_weights_list(folder: Path) -> Any:
    model = two_outputs(as_dict=False)
    model.compile("adam", ["mse", None], loss_weights=[0.5, 1.0])
    return fit(model, *two_data(as_dict=False)), model


@row("outputs with losses of different reductions")
def loss_mixed_reductions(folder: Path) -> Any:
    model = two_outputs()
    model.compile("adam", {"p": _mse("sum"), "q": _mse("mean_with_sample_weight")})
    given = {"p": weights(), "q": weights()}
    return fit(model, *two_data(), sample_weight=given), model


class Inner(layers.Layer):  # type: ignore[misc]
    """Adds a loss of its own."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * self.reduce(ops.square(x)))
        return x


def _with_inner(reduce: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5), Inner(reduce), layers.Dense(2)]
    )
    model.compile("adam", "mse")
    return fit(model, *regression(), validation_data=regression()), model


@row("`add_loss` of a mean over the batch")
def add_loss_mean(folder: Path) -> Any:
    return _with_inner(ops.mean)


@row(
    "`add_loss` of a sum over the batch, beside a mean",
    notes=("not-separable",),
    cuts=False,
    evaluate=None,
    slow=True,
)
def add_loss_sum(folder: Path) -> Any:
    return _with_inner(ops.sum)


@row("weight regularisers")
def regularizers(folder: Path) -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, kernel_regularizer="l2", bias_regularizer="l1"),
            layers.Dense(2, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1)),
        ]
    )
    model.compile("adam", "mse")
    return fit(model, *regression(), validation_split=0.3), model


@row("activity regulariser", slow=True)
def activity_regularizer(folder: Path) -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.1)),
            layers.ActivityRegularization(l1=0.1),
            layers.Dense(2),
        ]
    )
    model.compile("adam", "mse")
    return fit(model, *regression(), validation_split=0.3), model


@row("weight constraints", slow=True)
def constraints(folder: Path) -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5)),
            layers.Dense(2, bias_constraint="non_neg"),
        ]
    )
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("targets in time, weights in time")
def weights_in_time(folder: Path) -> Any:
    model = keras.Sequential([keras.Input((5, 3)), layers.Dense(2)])
    model.compile("adam", "mse", weighted_metrics=["mae"])
    x, y = array(COUNT, 5, 3), array(COUNT, 5, 2, seed=1)
    return fit(model, x, y, sample_weight=weights(COUNT, 5)), model


@row("a built-in loss over sequences (CTC)", floatx="float32", tolerance=1e-5)
def loss_ctc(folder: Path) -> Any:
    model = keras.Sequential([keras.Input((6, 3)), layers.Dense(4)])
    model.compile("sgd", keras.losses.CTC())
    y = np.random.default_rng(0).integers(1, 4, size=(COUNT, 2))
    return fit(model, array(COUNT, 6, 3), y), model
