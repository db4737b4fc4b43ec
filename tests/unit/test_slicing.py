"""Specs of batches: what a step is traced for before it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from oomrun.worker.engine import slicing

X = np.zeros((5, 3), "float32")
Y = np.zeros((5, 1), "float32")


def pipeline(structure: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(structure).batch(4)


@pytest.mark.parametrize(
    "structure",
    [
        (X, Y),
        (X, {"a": Y, "b": Y}),
        ({"a": X, "b": (X, Y)}, Y, {"a": Y}),
        X,
        (tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0], [5.0]]), Y),
        (tf.sparse.from_dense(X + 1), Y),
    ],
    ids=["pair", "dictionary", "nested", "alone", "ragged", "sparse"],
)
def test_every_batch_is_like_its_pipelines_spec(structure: Any) -> None:
    batches = pipeline(structure)
    for batch in batches:  # a full one, and a last one of one row
        assert slicing.spec_alike(batches.element_spec, batch) == batches.element_spec


@pytest.mark.parametrize(
    ("spec", "batch"),
    [
        ((X, Y), (X,)),
        ((X, Y), (X, Y, Y)),
        ((X, Y), (X, {"y": Y})),
        ((X, Y), (X[:, :2], Y)),
        ((X, Y), (X.astype("float64"), Y)),
    ],
    ids=["fewer", "more", "other form", "other shape", "other dtype"],
)
def test_a_batch_unlike_it_has_no_spec(spec: Any, batch: Any) -> None:
    assert slicing.spec_alike(pipeline(spec).element_spec, _tensors(batch)) is None


def test_nothing_in_a_generators_batch_is_nothing_in_the_spec() -> None:
    batches = pipeline((X, Y))
    spec = (*batches.element_spec, tf.OptionalSpec(None))
    given = (*_tensors((X, Y)), tf.experimental.Optional.empty(None))
    found = slicing.spec_alike(spec, slicing.as_tensors(given))
    assert found == (*batches.element_spec, None)


def _tensors(batch: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, batch)
