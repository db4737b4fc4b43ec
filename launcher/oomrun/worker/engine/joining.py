"""What the devices of a process have come to, made one.

Covers: gradients, which are added up; what the forward passes have changed: metrics
hold sums over samples, so the changes add up; of layers' statistics (BatchNorm) it is
the mean, weighted by samples; a count (random state) is the highest; what a step
returns. All on the first device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from oomrun.worker.engine import rows
from oomrun.worker.engine.mirror import Mirror, placed
from oomrun.worker.engine.returning import Logs, flat, in_form
from oomrun.worker.engine.snapshot import mutable_variables

__all__ = ["change", "join_state", "logs", "sums"]


def sums(examples: Sequence[Any], given: Sequence[Sequence[Any]]) -> list[Any]:
    """Each gradient over all devices.

    Args:
        examples: the gradients of any part, for their kinds.
        given: those of each device.
    """
    return [
        _sum(example, parts) for example, *parts in zip(examples, *given, strict=True)
    ]


def join_state(
    model: Any,
    mirrors: Sequence[Mirror],
    before: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> None:
    """Makes of what the passes have changed on each device one state of the model.

    Args:
        model: the model.
        mirrors: the devices.
        before: what its metrics held before the step.
        weights: each device's samples of the batch's.
    """
    metrics = list(model.metrics_variables)
    known = {id(v): old for v, old in zip(metrics, before, strict=True)}
    others = [v for v in mutable_variables(model) if id(v) not in known]
    found: list[list[tf.Tensor]] = []
    for mirror in mirrors:
        with mirror.in_use():
            found.append([tf.identity(v.value) for v in (*metrics, *others)])
    with placed(mirrors[0].device):
        for variable, *values in zip((*metrics, *others), *found, strict=True):
            dtype = values[0].dtype
            if id(variable) in known:
                old = known[id(variable)]
                variable.assign(old + _add([change(value, old) for value in values]))
            elif dtype.is_floating:
                shares = [tf.cast(weight, dtype) for weight in weights]
                first, *rest = zip(values, shares, strict=True)
                parts = [change(value, first[0]) * share for value, share in rest]
                variable.assign(_add([first[0], *parts]))
            elif dtype.is_integer:
                variable.assign(tf.reduce_max(tf.stack(values), 0))


def change(value: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """How far a value has come; 0 where it is the same, were it infinite.

    Means are made of changes, so that what no pass has written stays as it was to the
    last bit: a third of it, three times, need not be it.
    """
    return tf.where(tf.equal(value, old), tf.zeros_like(value), value - old)


def logs(
    model: Any, form: Any, returned: Sequence[tuple[Logs, Logs]], shares: tf.Tensor
) -> Logs:
    """As the step of the whole batch returns it.

    Args:
        model: the model.
        form: see ``Returned``.
        returned: of each device, what its last part returned, and the means.
        shares: samples of each.
    """
    known = flat(model.get_metrics_result())
    values = dict(returned[0][0])
    for index, (last, _) in enumerate(returned[1:], start=1):
        # The last part of the batch is that of the last device that has any.
        values = {
            name: tf.where(shares[index] > 0, last[name], value)
            for name, value in values.items()
        }
    for name in returned[0][1]:
        values[name] = _add([mean[name] for _, mean in returned])
    return in_form(  # type: ignore[no-any-return]
        form, iter(known.get(name, value) for name, value in values.items())
    )


def _add(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """One after the other, so that each may be given back once it is added."""
    first, *others = values
    for value in others:
        first = first + value
    return first


def _sum(example: Any, parts: Sequence[Any]) -> Any:
    """One weight's gradient over all devices."""
    if example is None:
        return None
    if not isinstance(example, tf.IndexedSlices):
        return _add(parts)
    values = tf.concat([part.values for part in parts], 0)
    indices = tf.concat([part.indices for part in parts], 0)
    return rows.joined(example, values, indices, parts[0].dense_shape)
