"""Random numbers that belong to the rows of a batch, while a step is tried out.

Whether a step can be cut is tried on a few rows, whole and in parts. A step that draws
random numbers would differ for that alone, so during a trial each row's numbers depend
on the row's place in the batch and on which draw it is, not on the size of the part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

__all__ = [
    "drawing_by_row",
    "freeze_batch_statistics",
    "noting_draws",
    "without_batch_statistics",
]

_ROWS = 16  # rows beyond have the numbers of the first ones again


class _Draws:
    """The draws of one traced part, counted so that no two are alike."""

    def __init__(self, start: Any, rows: Any) -> None:
        self._start, self._rows, self._count = start, rows, 0
        self._uniform = tf.random.stateless_uniform
        self._normal = tf.random.stateless_normal

    def _by_row(self, draw: Callable[..., tf.Tensor], shape: Any) -> tf.Tensor:
        self._count += 1
        seed = [20_231, self._count]
        shape = tf.convert_to_tensor(shape, tf.int32)
        if shape.shape.num_elements() == 0:
            return draw([], seed=seed, dtype=tf.float32)
        length = shape[0]
        values = draw(tf.concat([[_ROWS], shape[1:]], 0), seed=seed, dtype=tf.float32)
        start = tf.where(tf.equal(length, self._rows), self._start, 0)
        return tf.gather(values, tf.math.floormod(start + tf.range(length), _ROWS))

    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0,
        dtype: Any = tf.float32, *_: Any, **__: Any,
    ) -> tf.Tensor:  # fmt: skip
        values = tf.cast(self._by_row(self._normal, shape), dtype)
        return values * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None,
        dtype: Any = tf.float32, *_: Any, **__: Any,
    ) -> tf.Tensor:  # fmt: skip
        dtype = tf.as_dtype(dtype)
        high = tf.cast(1 if maxval is None else maxval, tf.float32)
        low = tf.cast(0 if minval is None else minval, tf.float32)
        values = self._by_row(self._uniform, shape) * (high - low) + low
        return tf.cast(values if dtype.is_floating else tf.floor(values), dtype)

    def dropout(
        self, x: Any, rate: Any, seed: Any = None, noise_shape: Any = None, **_: Any
    ) -> tf.Tensor:
        shape = tf.shape(x) if noise_shape is None else noise_shape
        kept = self._by_row(self._uniform, shape) >= tf.cast(rate, tf.float32)
        return x * tf.cast(kept, x.dtype) / tf.cast(1 - rate, x.dtype)


def _with_seed(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    return lambda shape, seed=None, *args, **kwargs: draw(shape, *args, **kwargs)


@contextlib.contextmanager
def drawing_by_row(start: Any, rows: Any) -> Iterator[None]:
    """Replaces TensorFlow's random functions while the block traces a part.

    Args:
        start: the part's first row in the batch, an int32 scalar.
        rows: the part's rows, an int32 scalar.
    """
    draws = _Draws(start, rows)

    def generated(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        return lambda generator, *args, **kwargs: draw(*args, **kwargs)

    dropout, nested = draws.dropout, tf.nn.experimental
    replaced: list[tuple[Any, str, Any]] = [
        (tf.nn, "dropout", lambda x, rate, **kwargs: dropout(x, rate, **kwargs)),
        (nested, "stateless_dropout", lambda x, rate, **kw: dropout(x, rate, **kw)),
        (tf.random.Generator, "normal", generated(draws.normal)),
        (tf.random.Generator, "uniform", generated(draws.uniform)),
    ]
    for kind, draw in (
        ("normal", draws.normal),
        ("truncated_normal", draws.normal),
        ("uniform", draws.uniform),
    ):
        replaced += [
            (tf.random, kind, draw),
            (tf.random, f"stateless_{kind}", _with_seed(draw)),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            # A step that AutoGraph converts would convert our function with it.
            kept = tf.autograph.experimental.do_not_convert(function)
            setattr(owner, name, kept)
        yield


@contextlib.contextmanager
def noting_draws() -> Iterator[list[Any]]:
    """Gives a list that each seed is put into from which the block draws."""
    cls = keras.random.SeedGenerator
    original = cls.next
    drawn: list[Any] = []

    def next_seed(seeds: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append(seeds)
        return original(seeds, *args, **kwargs)

    cls.next = next_seed
    try:
        yield drawn
    finally:
        cls.next = original


@contextlib.contextmanager
def without_batch_statistics() -> Iterator[None]:
    """Has BatchNormalization use its moving statistics while the block traces."""
    original = keras.layers.BatchNormalization.call
    freeze_batch_statistics()
    try:
        yield
    finally:
        keras.layers.BatchNormalization.call = original


def freeze_batch_statistics() -> None:
    """Has BatchNormalization use its moving statistics from now on."""
    original = keras.layers.BatchNormalization.call

    def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        del training
        return original(layer, inputs, training=False, mask=mask)

    keras.layers.BatchNormalization.call = call
