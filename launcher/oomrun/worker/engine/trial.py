"""Whether a step can be cut, found by taking it: whole and in parts, on a few rows.

For steps of which it is not known from Keras's own code: a user's ``train_step``, its
losses and metrics. The whole step and the very machinery that would cut it are run on
the first rows of a batch, and everything is compared: the gradients that each
optimizer would get, every variable that the step writes, everything that it returns.
The optimizers are not called: weights take one small step down their gradients, so
that what comes after them is tried as well. Afterwards all is as it was before.

A step's random numbers and its batch statistics would differ for themselves; they are
tied to the rows while it is tried (``drawing.py``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from oomrun.worker.engine import (
    attributes,
    comparing,
    cutting,
    drawing,
    keeping,
    losses,
    models,
    returning,
    separability,
    slicing,
)
from oomrun.worker.engine.applying import Apply
from oomrun.worker.engine.snapshot import Snapshot

__all__ = [
    "UNTRACEABLE",
    "Verdict",
    "cannot_trace",
    "try_evaluation",
    "try_step",
]

_RATE = 1e-2
#: What tracing a step raises that cannot be traced, or run, on a few rows.
UNTRACEABLE = (
    TypeError, ValueError, AttributeError, NotImplementedError,
    tf.errors.InvalidArgumentError,
)  # fmt: skip

Values = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        reason: why the step cannot be cut; empty where it can.
        metrics: metrics that would be those of the parts, not of the batch.
        averaged: values the step returns that are means over the samples of a batch.
        state: paths of variables of layers that would get other values.
    """

    reason: str = ""
    metrics: tuple[str, ...] = ()
    averaged: frozenset[str] = frozenset()
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Run:
    """What one way of taking the step has done."""

    gradients: list[np.ndarray[Any, Any]]
    written: list[np.ndarray[Any, Any]]
    logs: Values
    means: Values


def try_step(
    model: Any, data: Any, snapshot: Snapshot, *, sums: bool = False
) -> Verdict:
    """Tries whether ``model`` can be trained on parts of its batches.

    Args:
        model: built and compiled.
        data: a batch; its first rows are used.
        snapshot: of the model's mutable variables.
        sums: its losses are sums over samples.
    """
    found = separability.on_some_rows(
        data, lambda few: _try_rows(model, few, snapshot, sums)
    )
    return found or Verdict(reason="not even two rows fit into memory to try it on")


def _try_rows(model: Any, few: Any, snapshot: Snapshot, sums: bool) -> Verdict:
    rows = slicing.batch_size(few)
    before = attributes.Attributes(model)
    try:
        # First of all: what it refuses must not be run, not even on a few rows. It
        # makes what variables the step still makes, too.
        cutting.Cutter(model, snapshot).scout(few)
        variables = keeping.variables_of(model)
        if model.run_eagerly and before.changed():
            return Verdict(reason="its step keeps numbers in Python between batches")
        whole, again = _runs(model, _whole(model, rows), few, variables, 2)
        in_parts = _in_parts(model, rows, snapshot, sums)
        (parts,) = _runs(model, in_parts, few, variables, 1)
    except returning.NotCuttableError as error:
        return Verdict(reason=str(error))
    except UNTRACEABLE as error:
        return Verdict(reason=cannot_trace(error))
    finally:
        before.restore()
    return _judge(model, variables, whole, again, parts)


def try_evaluation(model: Any, data: Any) -> Verdict:
    """Tries which metrics can be had from parts of a batch; ``reason`` stays empty."""
    with attributes.left_as_they_were(model):
        found = separability.on_some_rows(data, lambda few: _try_evaluation(model, few))
    return found or Verdict()


def _try_evaluation(model: Any, few: Any) -> Verdict:
    rows = slicing.batch_size(few)
    with contextlib.suppress(*UNTRACEABLE):
        slicing.traced_for(lambda data: models.evaluated(model, data), few)
    variables = keeping.variables_of(model)

    def whole(data: Any) -> Any:
        with _by_row(tf.constant(0), tf.constant(rows)):
            return [], returning.flat(models.evaluated(model, data)), {}

    def parts(data: Any) -> Any:
        returned = _evaluated_in_parts(model, data, rows)
        return [], returned.last, returned.mean

    try:
        (one,) = _runs(model, whole, few, variables, 1)
        (other,) = _runs(model, parts, few, variables, 1)
    except UNTRACEABLE as error:
        return Verdict(metrics=(f"test_step ({_first(error)})",))
    tolerance = comparing.tolerance(model)
    differing = _differing(model, variables, one, other, tolerance)
    averaged, odd = _logs(one, other, tolerance)
    return Verdict(metrics=_named(model, differing, odd), averaged=averaged)


def _evaluated_in_parts(model: Any, data: Any, rows: int) -> returning.Returned:
    first = separability.first_part(rows)
    bounds = [(0, first), (first, rows)]
    kept = [(v, tf.identity(v.value)) for v in model.metrics_variables]

    def pass_over(start: int, stop: int, share: float, observer: Any) -> Any:
        size = tf.constant(stop - start)
        with _by_row(tf.constant(start), size):
            part = slicing.take(data, tf.constant(start), tf.constant(stop))
            return models.evaluated(model, part, share, observer)

    seen = [losses.Divisors() for _ in bounds]
    for (start, stop), divisors in zip(bounds, seen, strict=True):
        pass_over(start, stop, 1.0, divisors)
    for variable, value in kept:
        variable.assign(value)
    totals = losses.total([divisors.values for divisors in seen])
    returned = None
    for start, stop in bounds:
        share = (stop - start) / rows
        size = tf.constant(stop - start)
        reductions = losses.Reductions(size, tf.constant(rows), totals)
        logs = pass_over(start, stop, share, reductions)
        returned = returning.joined(returned, logs, share)
    assert returned is not None
    return returned


def cannot_trace(error: Exception) -> str:
    """Why a step that raised ``error`` is not cut."""
    return f"its step cannot be taken on a few rows: {_first(error)}"


def _first(error: Exception) -> str:
    # Keras names the layer first, then says what is wrong, in bold.
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    # A graph that fails says where it was made, and only then what is wrong.
    nodes = [at for at, line in enumerate(lines) if line.startswith("[[")]
    if lines and lines[0].startswith("Graph execution error") and nodes:
        lines = lines[max(1, nodes[0] - 1) : nodes[0]]
    return " ".join(lines[:2])[:300] or type(error).__name__


class _Descent:
    """In the optimizers' place: notes the gradients, and goes down them a little."""

    def __init__(self) -> None:
        self.gradients: list[tf.Tensor] = []

    def __call__(self, call: Apply, gradients: Sequence[Any] | None = None) -> None:
        given = call.gradients if gradients is None else gradients
        pairs = [
            (tf.convert_to_tensor(gradient), variable)
            for gradient, variable in zip(given, call.variables, strict=True)
            if gradient is not None
        ]
        call.optimizer.iterations.assign_add(1)
        if not pairs:
            return
        self.gradients += [gradient for gradient, _ in pairs]
        norm = tf.linalg.global_norm([tf.cast(g, tf.float64) for g, _ in pairs])
        rate = _RATE / tf.maximum(norm, 1.0)
        for gradient, variable in pairs:
            step = tf.cast(rate, gradient.dtype) * gradient
            variable.assign(variable.value - tf.cast(step, variable.value.dtype))


@contextlib.contextmanager
def _by_row(start: Any, rows: Any) -> Iterator[None]:
    with drawing.drawing_by_row(start, rows), drawing.without_batch_statistics():
        yield


def _whole(model: Any, rows: int) -> Callable[[Any], Any]:
    def step(data: Any) -> Any:
        descent = _Descent()
        with _by_row(tf.constant(0), tf.constant(rows)):
            logs = cutting.whole_step(model, data, descent)
        return descent.gradients, returning.flat(logs), {}

    return step


def _in_parts(
    model: Any, rows: int, snapshot: Snapshot, sums: bool
) -> Callable[[Any], Any]:
    def step(data: Any) -> Any:
        descent = _Descent()
        snapshot.take()
        cutter = cutting.Cutter(model, snapshot, sums=sums)
        size = separability.first_part(rows)
        batch = cutting.Batch(data, tf.constant(size))
        returned = cutter.step(batch, descent, around=_by_row)
        return descent.gradients, returned.last, returned.mean

    return step


def _runs(
    model: Any,
    step: Callable[[Any], Any],
    data: Any,
    variables: Sequence[Any],
    count: int,
) -> list[_Run]:
    """What the step does, taken ``count`` times from the same state."""
    if not model.run_eagerly:
        step = slicing.traced_for(step, data)
    runs = []
    for _ in range(count):
        with keeping.left_as_it_was(variables, model):
            gradients, logs, means = step(data)
            runs.append(
                _Run(
                    [keeping.host_copy(gradient) for gradient in gradients],
                    [keeping.host_copy(variable) for variable in variables],
                    {name: keeping.host_copy(value) for name, value in logs.items()},
                    {name: keeping.host_copy(value) for name, value in means.items()},
                )
            )
    return runs


def _judge(
    model: Any, variables: Sequence[Any], whole: _Run, again: _Run, parts: _Run
) -> Verdict:
    tolerance = comparing.tolerance(model)
    if not all(np.isfinite(gradient).all() for gradient in whole.gradients):
        return Verdict(reason="its gradients on a few samples are not finite")
    if not comparing.alike(whole.gradients, again.gradients, tolerance):
        return Verdict(
            reason="its step draws random numbers in a way that cannot be followed, so "
            "it could not be tried"
        )
    if not comparing.alike(whole.gradients, parts.gradients, tolerance):
        return Verdict(
            reason="the gradients of a few samples are not the mean of those of their "
            "parts: the loss compares samples of a batch with each other, adds sums "
            "to means, or is changed by something that depends on the batch"
        )
    differing = _differing(model, variables, whole, parts, tolerance)
    metrics = {id(variable) for variable in model.metrics_variables}
    state = [v for v in differing if id(v) not in metrics]
    if state and models.has_own_step(model):
        return Verdict(
            reason=f"its step writes {state[0].path} in a way that depends on how the "
            "batch is cut"
        )
    averaged, odd = _logs(whole, parts, tolerance)
    return Verdict(
        metrics=_named(model, [v for v in differing if id(v) in metrics], odd),
        averaged=averaged,
        state=tuple(str(variable.path) for variable in state),
    )


def _differing(
    model: Any, variables: Sequence[Any], whole: _Run, parts: _Run, tolerance: float
) -> list[Any]:
    """Variables, but for weights and seeds, that the parts left at other values."""
    trained = {id(weight) for weight in model.trainable_weights}
    return [
        variable
        for variable, one, other in zip(
            variables, whole.written, parts.written, strict=True
        )
        if id(variable) not in trained
        and variable.name != "seed_generator_state"
        and not comparing.alike([one], [other], tolerance)
    ]


def _named(model: Any, variables: Sequence[Any], logs: set[str]) -> tuple[str, ...]:
    """Metrics by name: those that own one of ``variables``, and returned values."""
    owners: dict[int, str] = {}
    compiled = getattr(model._compile_metrics, "metrics", ())
    for metric in (*model.metrics, *compiled):
        owners |= {id(variable): str(metric.name) for variable in metric.variables}
    names = [owners.get(id(v), str(v.path)) for v in variables]
    return tuple(dict.fromkeys([*sorted(logs), *names]))


def _logs(
    whole: _Run, parts: _Run, tolerance: float
) -> tuple[frozenset[str], set[str]]:
    """Which returned values are means over samples, and which are neither."""
    averaged, odd = set(), set()
    for name, value in whole.logs.items():
        if comparing.alike([value], [parts.logs[name]], tolerance):
            continue
        if name in parts.means and comparing.alike(
            [value], [parts.means[name]], tolerance
        ):
            averaged.add(name)
        else:
            odd.add(name)
    return frozenset(averaged), odd
