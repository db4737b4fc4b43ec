"""How the loss of a batch follows from the losses of its parts, for a loss function.

A value for each sample: the loss is their mean. A scalar: Keras's own losses are
corrected where they are not means over samples (``losses.py``), and whether the rest of
the function is a mean or a sum is tried on the first batch that is to be cut
(docs/decisions/0010). So are functions that give a value for each sample: the values
may depend on the other samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from oomrun.worker.engine import drawing, loss_scout, losses, separability, slicing
from oomrun.worker.engine.objects import Kept, Objects
from oomrun.worker.engine.separability import Separability

__all__ = ["Cut", "Reductions", "correcting", "find", "mean"]

_Array: TypeAlias = np.ndarray[Any, Any]
_Observer: TypeAlias = losses.Divisors | losses.Reductions | None


@dataclass(frozen=True)
class Cut:
    """What is known of a loss function.

    Attributes:
        found: how the parts' losses combine.
        corrected: whether Keras's losses in it are to be corrected.
        by_sample: whether it gives a value for each sample.
        divisors: whether Keras's losses in it average over masks or weights.
        metrics: metrics that are those of the micro-batches then, by name.
        depends: a variable that it writes otherwise for parts; empty for none.
        shown: whether trials had a value that could show it: not zero, and finite.
        unkept: a variable that it writes but the loop does not keep; empty for none.
        draws: whether it draws random numbers that can be followed.
        written: the ids of the variables that it changed in trials.
    """

    found: Separability
    corrected: bool
    by_sample: bool
    divisors: bool = False
    metrics: tuple[str, ...] = ()
    depends: str = ""
    shown: bool = True
    unkept: str = ""
    draws: bool = False
    written: frozenset[int] = frozenset()

    @property
    def possible(self) -> bool:
        """Whether parts give the gradient of the whole, as far as can be told."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why batches cannot be cut; empty where they can.

        A function that draws random numbers out of TensorFlow's sight cannot be tried.
        Values of samples are then taken at their word, a scalar is not.
        """
        if self.unkept:
            return (
                f"writes the variable {self.unkept}, which is not in state=[...], so "
                "it would be written once for each part, and could not be put back"
            )
        if not self.shown:
            return (
                "gives exactly zero, or no finite number, for the samples that it was "
                "tried on, and that does not show how it follows from parts of a batch"
            )
        if self.found is Separability.NONE:
            return (
                "gives for some samples neither the mean nor the sum of what it gives "
                "for parts of them: it compares samples of a batch with each other, or "
                "adds sums to means"
            )
        if self.found is Separability.UNKNOWN and not self.by_sample:
            return (
                "draws random numbers in a way that cannot be followed, and gives no "
                "value for each sample"
            )
        if self.depends:
            return f"writes {self.depends} in a way that depends on how a batch is cut"
        return ""


class Reductions(losses.Reductions):
    """Corrections for a loop, where values of single samples are averaged by us."""

    def factor(self, divisor: tf.Tensor | None, reduction: str | None) -> Any:
        """As for a Keras model, but values that are not reduced are left alone."""
        factor = super().factor(divisor, reduction)
        return None if reduction in ("none", None) else factor


def correcting(observer: _Observer) -> contextlib.AbstractContextManager[None]:
    """Has Keras's losses observed or corrected; None: left as they are."""
    return contextlib.nullcontext() if observer is None else losses.correcting(observer)


def mean(loss: Any, data: Any) -> tf.Tensor:
    """The scalar that a loss function's result for ``data`` stands for.

    Raises:
        TypeError: it returned something else than one tensor.
        ValueError: it returned another number of values than there are samples.
    """
    if loss is None or isinstance(loss, list | tuple | dict):
        raise TypeError(
            "the loss function given to oomrun.Loop must return one tensor: a value "
            f"for each sample, or a scalar; it returned {type(loss).__name__}. What "
            "else is to be seen of a step belongs into a metric in state=[...]"
        )
    loss = tf.convert_to_tensor(loss)
    if loss.dtype in (tf.float16, tf.bfloat16):
        loss = tf.cast(loss, tf.float32)  # a sum over samples can overflow in half
    if loss.shape.rank == 0:
        return loss
    samples = slicing.known_rows(data)
    text = (
        "the loss function given to oomrun.Loop must return one value for each sample "
        "of the batch, or a scalar"
    )
    if samples is not None and loss.shape[0] not in (None, samples):
        raise ValueError(f"{text}; it returned {loss.shape[0]} for {samples} samples")
    check = tf.debugging.assert_equal(tf.shape(loss)[0], slicing.rows(data), text)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.reduce_mean(loss)


def find(loss: Callable[[Any], Any], data: Any, objects: Objects) -> Cut:
    """Tries how the loss of some rows of ``data`` follows from its parts.

    Each half of the batch, without gradients; where memory does not do for that, a few
    rows. What the loss function writes is compared too, and put back.
    """
    few = separability.rows_for(slicing.batch_size(data))
    scouted = loss_scout.scout(loss, slicing.sample(data, few), objects)
    if scouted.unkept:
        # It must not even be tried: that could not be undone.
        none = Cut(Separability.NONE, corrected=True, by_sample=False)
        return dataclasses.replace(none, unkept=scouted.unkept)
    cut = _tried(loss, data, few, objects)
    return dataclasses.replace(cut, draws=scouted.draws)


def _tried(loss: Callable[[Any], Any], data: Any, few: int, objects: Objects) -> Cut:
    """As ``find``, by trials alone, at the least of a ``few`` rows."""
    samples = slicing.batch_size(data)
    half = samples // 2
    if half > few:
        rest = slicing.take(data, tf.constant(samples - half), tf.constant(samples))
        with contextlib.suppress(tf.errors.ResourceExhaustedError):
            return _judged(loss, [slicing.sample(data, half), rest], objects)
    return _judged(loss, [slicing.sample(data, few)], objects)


def _judged(loss: Callable[[Any], Any], samples: list[Any], objects: Objects) -> Cut:
    """What trials on each of ``samples`` say, batches of as many rows each."""
    rows = slicing.batch_size(samples[0])
    cut = _Trial(loss, rows, objects, corrected=True).run(samples)
    if cut.found is Separability.NONE and not cut.divisors:
        # The function may undo itself what we correct, dividing a sum by its count.
        cut = _Trial(loss, rows, objects, corrected=False).run(samples)
    return cut


class _Trial:
    """The losses of some rows, whole and in two parts, unequal in two ways."""

    def __init__(
        self,
        loss: Callable[[Any], Any],
        rows: int,
        objects: Objects,
        *,
        corrected: bool,
    ) -> None:
        self._loss, self._rows, self._corrected = loss, rows, corrected
        self._objects = objects
        self._tolerance = separability.tolerance(objects)
        self._has_divisor: list[bool] = []
        self._by_sample = False
        self._found: set[Separability] = set()
        self._by_parts: Any = None
        self._otherwise: list[Kept] = []
        self._written: set[int] = set()

    def run(self, samples: list[Any]) -> Cut:
        """What comes of it."""
        # Traced twice, so that what is drawn by the tracing itself shows as well.
        wholes = [slicing.traced_for(self._whole, samples[0]) for _ in range(2)]
        for data in samples:
            self._try(wholes, data)
        found = self._agreed()
        metrics: list[str] = []
        depends = ""
        for kept in self._otherwise:
            metric = self._objects.metric_of(kept)
            metrics += [metric] if metric else []
            depends = depends or ("" if metric else kept.path)
        return Cut(
            found,
            corrected=self._corrected,
            by_sample=self._by_sample,
            divisors=any(self._has_divisor),
            metrics=tuple(dict.fromkeys(metrics)),
            depends="" if found is Separability.UNKNOWN else depends,
            shown=bool(self._found),
            written=frozenset(self._written),
        )

    def _agreed(self) -> Separability:
        if Separability.UNKNOWN in self._found:
            return Separability.UNKNOWN
        return next(iter(self._found)) if len(self._found) == 1 else Separability.NONE

    def _try(self, wholes: list[Any], data: Any) -> None:
        (whole, *divisors), written = self._ran(wholes[0], data)
        (again, *_), _ = self._ran(wholes[1], data)
        if float(whole) == 0 or not math.isfinite(whole):
            return
        first = separability.first_part(self._rows)
        for size in dict.fromkeys((first, self._rows - first)):
            cut = (data, tf.constant(size), divisors)
            if self._by_parts is None:
                self._by_parts = slicing.traced_for(self._parts, cut)
            (mean, total), by_parts = self._ran(self._by_parts, cut)
            found = separability.judge(
                float(whole), float(again), float(mean), float(total), self._tolerance
            )
            self._found.add(found)
            self._compare(written, by_parts)

    def _compare(self, written: list[_Array], by_parts: list[_Array]) -> None:
        kept = self._objects.non_trainable_variables
        for variable, one, other in zip(kept, written, by_parts, strict=True):
            if variable.path.endswith(_SEED) or _alike(one, other, self._tolerance):
                continue
            if all(variable.value is not seen.value for seen in self._otherwise):
                self._otherwise.append(variable)

    def _ran(self, traced: Any, data: Any) -> tuple[list[tf.Tensor], list[_Array]]:
        """What is found, and what has been written by the way; all is put back."""
        kept = self._objects.non_trainable_variables
        before = _values(kept)
        try:
            found, after = traced(data), _values(kept)
            self._written |= {
                id(variable.value)
                for variable, old, new in zip(kept, before, after, strict=True)
                if old.tobytes() != new.tobytes()
            }
            return found, after
        finally:
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)

    def _whole(self, data: Any) -> list[tf.Tensor]:
        """The loss, and the divisors of Keras's losses in it."""
        seen = losses.Divisors()
        loss = self._part(data, tf.constant(0), tf.constant(self._rows), seen)
        self._has_divisor = [value is not None for value in seen.values]
        return [loss, *(value for value in seen.values if value is not None)]

    def _parts(self, cut: tuple[Any, tf.Tensor, list[tf.Tensor]]) -> list[tf.Tensor]:
        """The losses of two parts as their mean and as their sum."""
        data, first, divisors = cut
        present = iter(divisors)
        totals = [next(present) if has else None for has in self._has_divisor]
        rows = tf.constant(self._rows)
        parts, weighted = [], []
        for start, stop in [(tf.constant(0), first), (first, rows)]:
            observer = Reductions(stop - start, rows, totals)
            part = self._part(data, start, stop, observer if self._corrected else None)
            parts.append(part)
            weighted.append(part * tf.cast((stop - start) / rows, part.dtype))
        return [tf.add_n(weighted), tf.add_n(parts)]

    def _part(
        self, data: Any, start: tf.Tensor, stop: tf.Tensor, observer: _Observer
    ) -> tf.Tensor:
        share = tf.cast((stop - start) / self._rows, tf.float64)
        # Random numbers and batch statistics would differ in a whole and its parts.
        with (
            drawing.drawing_by_row(start, stop - start),
            drawing.without_batch_statistics(),
            losses.tracking_shares(self._objects, share),
            correcting(observer),
        ):
            few = slicing.take(data, start, stop)
            result = self._loss(few)
        value = mean(result, few)
        self._by_sample = tf.convert_to_tensor(result).shape.rank != 0
        return value


def _values(kept: list[Kept]) -> list[_Array]:
    # Copies: what TensorFlow gives may share the variables' memory.
    return [np.array(variable.value.numpy()) for variable in kept]


# How Keras ends the names of its random generators' states.
_SEED = "seed_generator_state"


def _alike(one: _Array, other: _Array, tolerance: float) -> bool:
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    difference = float(np.abs(one - other).max(initial=0.0))
    return difference <= tolerance * max(float(np.abs(one).max(initial=0.0)), 1e-9)
