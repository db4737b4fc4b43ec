"""Rows: what is measured while training and evaluating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import layers, ops

from engine.registry import row, section
from engine.samples import (
    binary,
    classes,
    classifier,
    compiled,
    dense,
    fit,
    regression,
    tagger,
    tokens,
    two_data,
    two_outputs,
    weights,
)

section("Metrics")


@row("as strings")
def metrics_strings(folder: Path) -> Any:
    model = classifier(metrics=["accuracy", "sparse_categorical_crossentropy"])
    return fit(model, *classes(), validation_data=classes()), model


@row("as objects: AUC, Precision, Recall and others with a state of their own")
def metrics_stateful(folder: Path) -> Any:
    model = dense(1, "sigmoid")
    metrics = keras.metrics
    model.compile(
        "adam",
        "binary_crossentropy",
        metrics=[metrics.AUC(), metrics.Recall(0.4)],
        weighted_metrics=[metrics.Precision(), metrics.AUC(name="pr", curve="PR")],
    )
    x, y = binary()
    return fit(model, x, y, sample_weight=weights(), validation_data=(x, y)), model


@row("as objects: R2, RMSE, cosine similarity", slow=True)
def metrics_regression(folder: Path) -> Any:
    metrics = keras.metrics
    model = compiled(
        metrics=[
            metrics.R2Score(),
            metrics.RootMeanSquaredError(),
            metrics.CosineSimilarity(),
        ]
    )
    return fit(model, *regression(), validation_data=regression()), model


@row("as objects: confusion matrices (MeanIoU)", slow=True)
def metrics_confusion(folder: Path) -> Any:
    model = classifier(
        metrics=[
            keras.metrics.MeanIoU(3, sparse_y_pred=False),
            keras.metrics.SparseCategoricalAccuracy(),
        ]
    )
    return fit(model, *classes(), validation_data=classes()), model


@row("as a function, one value a sample", slow=True)
def metrics_function(folder: Path) -> Any:
    def error(y: Any, p: Any) -> Any:
        return ops.max(ops.abs(y - p), axis=-1)

    model = compiled(metrics=[error], weighted_metrics=[error])
    return fit(model, *regression(), sample_weight=weights()), model


@row("as a function, a mean over the batch", slow=True)
def metrics_function_mean(folder: Path) -> Any:
    def error(y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p))

    model = compiled(metrics=[error])
    return fit(model, *regression(), validation_data=regression()), model


@row(
    "as a function, no mean over samples (root of a mean)",
    notes=("metrics-of-micro-batches",),
    differs="error$",
)
def metrics_function_root(folder: Path) -> Any:
    def error(y: Any, p: Any) -> Any:
        return ops.sqrt(ops.mean(ops.square(y - p)))

    model = compiled(metrics=[error])
    return fit(model, *regression(), validation_data=regression()), model


@row("for each output, as dicts, weighted or not")
def metrics_dict(folder: Path) -> Any:
    model = two_outputs()
    model.compile(
        "adam",
        {"p": "mse", "q": "binary_crossentropy"},
        metrics={"p": ["mae"], "q": ["accuracy", keras.metrics.AUC()]},
        weighted_metrics={"p": ["mse"]},
    )
    x, y = two_data()
    given = {"p": weights(), "q": weights()}
    return fit(model, x, y, sample_weight=given, validation_data=(x, y)), model


@row("for each output, as lists", slow=True)
def metrics_list(folder: Path) -> Any:
    model = two_outputs(as_dict=False)
    metrics = [["mae", "mse"], ["accuracy"]]
    model.compile("adam", ["mse", "binary_crossentropy"], metrics=metrics)
    return fit(model, *two_data(as_dict=False)), model


@row("masked")
def metrics_masked(folder: Path) -> Any:
    model = tagger(metrics=["accuracy"], weighted_metrics=["accuracy"])
    x, y = tokens()
    return fit(model, x, y, validation_data=(x, y)), model


@row("a metric class of the user's", slow=True)
def metrics_class(folder: Path) -> Any:
    class Largest(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - p))))

        def result(self) -> Any:
            return self.value

    model = compiled(metrics=[Largest()])
    return fit(model, *regression(), validation_data=regression()), model


@row(
    "a metric that counts its updates (batches)",
    notes=("metrics-of-micro-batches",),
    differs="/updates$",
)
def metrics_counting(folder: Path) -> Any:
    class Updates(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="updates")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.value.assign_add(1)

        def result(self) -> Any:
            return self.value

    model = compiled(metrics=[Updates()])
    return fit(model, *regression()), model


@row(
    "a `compute_metrics` of the user's",
    notes=("metrics-of-micro-batches",),
    differs="/spread(/|$)",
)
def own_compute_metrics(folder: Path) -> Any:
    class Measured(keras.Model):  # type: ignore[misc]
        def compute_metrics(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
        ) -> Any:
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**logs, "spread": ops.max(y_pred) - ops.min(y_pred)}

    x = keras.Input((4,))
    model = Measured(x, layers.Dense(2)(x))
    model.compile("adam", "mse", metrics=["mae"])
    return fit(model, *regression()), model


@row("a metric updated in the model's own `call`")
def metric_in_call(folder: Path) -> Any:
    class Watched(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2)
            self.size = keras.metrics.Mean(name="size")

        def call(self, x: Any) -> Any:
            found = self.dense(x)
            self.size.update_state(ops.sum(ops.square(found), axis=-1))
            return found

    model = Watched()
    model.compile("adam", "mse")
    return fit(model, *regression()), model


@row("no metrics, and metrics as batch-end logs")
def batch_logs(folder: Path) -> Any:
    seen: list[Any] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs)),
        on_test_batch_end=lambda batch, logs: seen.append(dict(logs)),
    )
    model = compiled(metrics=["mae"])
    history = fit(model, *regression(), validation_split=0.4, callbacks=[watch])
    return history, seen, model
