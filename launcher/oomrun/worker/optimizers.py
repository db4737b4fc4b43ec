"""The levers ``optimizer_*``: models are compiled with an optimizer of smaller state.

Covers: which one takes the place of the script's own, what it takes over from it, how
many bytes of slots that saves, and what of a checkpoint goes on where it was written
with another optimizer. Does not cover: when it is pulled (``oomrun.core.levers``),
custom loops, optimizers that a class of the script's keeps beside its compiled one.
Source of what is relied on: keras/src/optimizers/base_optimizer.py, 3.3 to 3.15.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import trainer as keras_trainer

from oomrun.core.spec import OPTIMIZERS
from oomrun.worker.adafactor import Adafactor
from oomrun.worker.encoding import Arrays
from oomrun.worker.engine import keeping

__all__ = [
    "carried_over", "in_use", "install", "other_in", "replaced", "slots_of", "written",
]  # fmt: skip

_KINDS: Mapping[str, Callable[..., Any]] = {
    "optimizer_sgd": keras.optimizers.SGD,
    "optimizer_adafactor": Adafactor,
    "optimizer_lion": keras.optimizers.Lion,
}
# What every optimizer of Keras has.
_TAKEN_OVER = (
    "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema",
    "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor",
    "gradient_accumulation_steps",
)  # fmt: skip
_EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
# Where the model has no weights yet: a matrix and a vector tell which has more state.
_TYPICAL = ((64, 64), (64,))

# The script's own, by the one in its place. Each is one for all models it is given to.
_written: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_in_place: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lever_of: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def install(levers: Sequence[str], note: Callable[[str, str], None]) -> None:
    """From now on models are compiled so. To be called once, before the script runs.

    Args:
        levers: those of the plan; of several optimizers the smallest one counts.
        note: tells a person something, once.
    """
    lever = [name for name in OPTIMIZERS if name in levers][-1]
    original = keras_trainer.Trainer.compile
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(model, *args, **kwargs)
        # One that is not named is Keras's default, for a class that has others.
        if bound.arguments.get("optimizer") is not None:
            own = keras.optimizers.get(bound.arguments["optimizer"])
            bound.arguments["optimizer"] = _smaller(lever, own, model, note)
        return original(*bound.args, **bound.kwargs)

    keras_trainer.Trainer.compile = compile_model


def written(optimizer: Any) -> Any:
    """The optimizer that the script gave its model."""
    return _written.get(optimizer, optimizer) if optimizer is not None else None


def replaced(model: Any) -> dict[str, Any] | None:
    """What is in place of what, as ``OptimizerReplaced`` has it; None: nothing is."""
    optimizer = model.optimizer
    own = written(optimizer)
    if own is optimizer:
        return None
    weights = model.trainable_variables
    return {
        "lever": _lever_of[optimizer],
        "model": model.name,
        "written": type(own).__name__,
        "used": type(optimizer).__name__,
        "written_bytes": sum(slots_of(own, weights) or ()),
        "used_bytes": sum(slots_of(optimizer, weights) or ()),
    }


def _smaller(lever: str, own: Any, model: Any, note: Callable[[str, str], None]) -> Any:
    """What ``model`` is compiled with in the place of ``own``."""
    if own in _in_place:
        return _in_place[own]  # compiled again: its state stays
    name = type(own).__name__
    if isinstance(own, keras.optimizers.LossScaleOptimizer):
        note("optimizer", f"{name} scales the loss: {lever} leaves it as it is")
        return own
    found = _like(_KINDS[lever], own)
    weights = model.trainable_variables if model.built else _typical()
    sizes = [slots_of(which, weights) for which in (found, own)]
    if sizes[1] is None or sizes[0] is None or sum(sizes[0]) >= sum(sizes[1]):
        why = "its state cannot be told" if sizes[1] is None else "it has no more state"
        note("optimizer", f"{name} is left as it is by {lever}: {why}")
        return own
    _in_place[own], _written[found], _lever_of[found] = found, own, lever
    return found


def _typical() -> list[Any]:
    return [keras.Variable(np.zeros(shape), name="weight") for shape in _TYPICAL]


def _like(kind: Callable[..., Any], own: Any) -> Any:
    """One of ``kind``, which goes on as ``own`` does where both have the same."""
    rate = own._learning_rate
    variable = isinstance(rate, keras.Variable)
    shared = {name: getattr(own, name) for name in _TAKEN_OVER}
    found = kind(learning_rate=0.0 if variable else rate, **shared)
    # The very variables: what the script does to its own, by its name, counts.
    names = ("_iterations", "_learning_rate") if variable else ("_iterations",)
    for name in names:
        found._untrack_variable(getattr(found, name))
    for name in names:
        setattr(found, name, getattr(own, name))
    for name in _EXCLUDED:
        if hasattr(own, name):
            setattr(found, name, getattr(own, name))
    return found


def slots_of(optimizer: Any, weights: Sequence[Any]) -> list[int] | None:
    """Bytes of each slot that it has, or would have, for ``weights``; none is made.

    None where the optimizer's class does not let that be found out.
    """
    found: list[int] = []

    def add_variable(shape: Any, *_: Any, dtype: Any = None, **__: Any) -> None:
        size: int = tf.as_dtype(dtype or keras.config.floatx()).size
        found.append(math.prod(shape) * size)

    def add_like(variable: Any, *_: Any, **__: Any) -> None:
        add_variable(variable.shape, dtype=variable.dtype)

    try:
        twin = type(optimizer).from_config(optimizer.get_config())
        vars(twin)["add_variable"] = add_variable
        vars(twin)["add_variable_from_reference"] = add_like
        twin.build(list(weights))
    except Exception:  # whatever a class of the script's own does
        return None
    return found


# --- checkpoints --------------------------------------------------------------------


def in_use(model: Any) -> dict[str, Any] | None:
    """What a checkpoint says of the optimizer that has written it."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    return {
        "lever": _lever_of.get(optimizer, ""),
        "variables": len(optimizer.variables),
    }


def other_in(state: Mapping[str, Any], model: Any) -> bool:
    """Whether a checkpoint was written with another optimizer than the model has."""
    was, now = state.get("optimizer"), in_use(model)
    return was is not None and now is not None and was["lever"] != now["lever"]


def carried_over(
    state: Mapping[str, Any], arrays: Arrays, model: Any, variables: Sequence[Any]
) -> tuple[Arrays, int] | None:
    """What goes on of a checkpoint that another optimizer has written.

    That is all but its slots: weights and metrics, the count of steps, the learning
    rate, averages of weights, gradients that were added up.

    Args:
        state: the checkpoint's.
        arrays: the checkpoint's.
        model: compiled with the optimizer of now.
        variables: all that are restored, in their order.

    Returns:
        Arrays for ``variables``, slots with the values that they have now, and the
        bytes of the slots that are left behind; None where the model has other
        variables than the checkpoint.
    """
    optimizer = model.optimizer
    own = {id(variable.value) for variable in optimizer.variables}
    places = [i for i, v in enumerate(variables) if id(v.value) in own]
    saved = sum(1 for name in arrays if name.startswith("variable/"))
    count = state["optimizer"]["variables"]
    if saved - count != len(variables) - len(places) or not places:
        return None
    first, shared = places[0], _shared(optimizer)
    fresh = places[shared:]
    values = keeping.host_copies([variables[place] for place in fresh])
    found = {f"variable/{at}": value for at, value in zip(fresh, values, strict=True)}
    for at in range(len(variables)):
        moved = at + count - len(places) if at > places[-1] else at
        if at not in fresh:
            found[f"variable/{at}"] = arrays[f"variable/{moved}"]
    left = (arrays[f"variable/{at}"] for at in range(first + shared, first + count))
    return found, sum(array.nbytes for array in left)


def _shared(optimizer: Any) -> int:
    """How many of its variables every optimizer has, the first ones."""
    variables = optimizer.variables
    lists = ("_model_variables_moving_average", "_accumulated_gradients")
    kept = [optimizer._iterations, optimizer._learning_rate]
    kept += [v for name in lists for v in getattr(optimizer, name, None) or ()]
    known = {id(v) for v in kept}
    return sum(1 for variable in variables if id(variable) in known)
