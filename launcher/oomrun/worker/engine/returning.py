"""What a step returns, and what it would have returned for a batch in one piece."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from oomrun.worker import pool

__all__ = [
    "Logs", "NotCuttableError", "Returned", "aside", "flat", "in_form", "joined",
    "specs",
]  # fmt: skip

#: Elements of what is a metric's value, and not a prediction, say.
_FEW = 1024

#: Values that a step returns, by path.
Logs = dict[str, Any]


class NotCuttableError(ValueError):
    """The step does something that cannot be done in parts."""


@dataclass(frozen=True)
class Returned:
    """What a step in parts returns, as if it had been one.

    Attributes:
        last: what it returned for the last part: for a metric, the metric of all.
        mean: of what it returned for each part, weighted by samples.
        form: the nested dictionary that it returns.
    """

    last: Logs
    mean: Logs
    form: Any

    def logs(self, averaged: Container[str]) -> Any:
        """As the step of the whole batch returns it; of ``averaged`` the mean."""
        return in_form(
            self.form,
            iter(
                self.mean[name] if name in averaged else value
                for name, value in self.last.items()
            ),
        )


def aside(logs: Any) -> Any:
    """The same values, copied to where they are in nobody's way.

    They were made in the midst of a step, and lie in the midst of the device's pool:
    256 bytes there, which Keras holds until the next step has returned, split what
    that one needs in one piece. Measured: with them steps of a network of 163 samples
    a pass needed a pool of 104 to 116 MiB, without 103 to 108. What is copied between
    two steps is given the smallest hole.

    Args:
        logs: what a step has returned, eager; in any structure.
    """
    if pool.limit_bytes() is None:
        return logs
    return tf.nest.map_structure(_copied, logs, expand_composites=True)


def _copied(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return value
    few = value.shape.is_fully_defined() and value.shape.num_elements() <= _FEW
    return tf.constant(value.numpy()) if few else value


def flat(logs: Any) -> Logs:
    """What a step returns, nested dictionaries opened: ``{"a/b": …}``."""
    opened: Logs = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            opened |= {f"{name}/{inner}": v for inner, v in flat(value).items()}
        else:
            opened[name] = value
    return opened


def joined(before: Returned | None, logs: Any, share: float | tf.Tensor) -> Returned:
    """What the parts so far have returned, with one more, of ``share`` of the batch."""
    last = flat(logs)
    share = tf.convert_to_tensor(share, tf.float64)
    mean = {
        name: value * tf.cast(share, value.dtype)
        for name, value in last.items()
        if tf.convert_to_tensor(value).dtype.is_floating
    }
    if before is not None:
        mean = {name: before.mean[name] + value for name, value in mean.items()}
    return Returned(last, mean, logs)


def in_form(form: Any, values: Iterator[tf.Tensor]) -> Any:
    """The values in the nested dictionary that ``form`` is."""
    return {
        name: in_form(value, values) if isinstance(value, dict) else next(values)
        for name, value in form.items()
    }


def specs(logs: Any) -> dict[str, tf.TensorSpec]:
    """Dtype and shape of what a step returns."""
    if not isinstance(logs, dict):
        raise NotCuttableError("its train_step returns something else than a dict")
    specs = {}
    for name, value in flat(logs).items():
        try:
            tensor = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            tensor = None
        numeric = tensor is not None and (
            tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
        )
        if not numeric or not tensor.shape.is_fully_defined():
            raise NotCuttableError(
                f"its train_step returns {name!r}, which is not a number or a tensor "
                "whose shape is alike for all batches"
            )
        specs[name] = tf.TensorSpec(tensor.shape, tensor.dtype)
    return specs
