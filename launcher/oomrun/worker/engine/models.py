"""What the engine knows of Keras's models: what a step of theirs is made of.

Source of what is relied on: keras/src/trainers/trainer.py and
keras/src/backend/tensorflow/trainer.py, 3.3 to 3.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from oomrun.worker.engine import losses
from oomrun.worker.engine.applying import optimizers_of

__all__ = [
    "cannot_cut",
    "cannot_step",
    "evaluated",
    "has_own_evaluation",
    "has_own_loss",
    "has_own_step",
    "layer_state",
    "loss_multiplied",
    "loss_of",
    "loss_of_part",
    "needs_trial",
    "unpack",
]


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """A batch as (x, y, sample_weight), as Keras reads it."""
    return keras.utils.unpack_x_y_sample_weight(data)  # type: ignore[no-any-return]


def has_own_step(model: Any) -> bool:
    """Whether the model's ``train_step`` is another one than Keras's."""
    return _own(model, "train_step")


def has_own_evaluation(model: Any) -> bool:
    """Whether the model's ``test_step`` is another one than Keras's."""
    return _own(model, "test_step")


def _own(model: Any, name: str) -> bool:
    cls = type(model)
    return name in vars(model) or getattr(cls, name) is not getattr(keras.Model, name)


def needs_trial(model: Any) -> bool:
    """Whether a whole step has to be tried before it can be said how it is cut.

    Of Keras's own step, losses and metrics it is known but for the user's loss, which
    a cheaper trial judges (``separability.py``).
    """
    own = ("train_step", "compute_metrics", "compute_loss")
    if any(_own(model, name) for name in own) or _has_own_metrics(model):
        return True
    return bool(layer_state(model)) or _has_own_layers(model)


def has_own_loss(model: Any) -> bool:
    """Whether the compiled loss, or a part of it, is not one of Keras's."""
    if _own(model, "compute_loss"):
        return True
    given = getattr(model._compile_loss, "_user_loss", None)
    return any(
        not isinstance(loss, str)
        and loss is not None
        and not _is_keras(getattr(loss, "fn", loss))
        for loss in keras.tree.flatten(given)
    )


def _has_own_layers(model: Any) -> bool:
    """Whether a layer may mix samples in training only, which no other trial shows."""
    mixing = ("Lambda", "MixUp", "CutMix")
    return any(
        not _is_keras(type(layer)) or type(layer).__name__ in mixing
        for layer in model._flatten_layers()
    )


def _is_keras(value: Any) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).startswith("keras.")


def layer_state(model: Any) -> list[str]:
    """Paths of variables that layers may write in a pass, but for what is well known.

    Well known are the moving statistics of BatchNormalization and random seeds.
    """
    known = {
        id(variable)
        for layer in model._flatten_layers()
        for variable in (
            layer.variables
            if isinstance(layer, keras.layers.BatchNormalization)
            else getattr(layer, "_trainable_variables", ())
        )
    }
    return [
        str(variable.path)
        for variable in model.non_trainable_variables
        if id(variable) not in known and variable.name != "seed_generator_state"
    ]


def _has_own_metrics(model: Any) -> bool:
    compiled = getattr(model._compile_metrics, "metrics", ())
    return any(map(_is_own_metric, (*model.metrics, *compiled)))


def _is_own_metric(metric: Any) -> bool:
    # A function of the user's is wrapped in a metric of Keras's.
    parts = (type(metric), getattr(metric, "_fn", None))
    return any(part is not None and not _is_keras(part) for part in parts)


def evaluated(model: Any, data: Any, share: Any = 1.0, observer: Any = None) -> Any:
    """The model's ``test_step`` over a batch or a part of it.

    Args:
        model: compiled.
        data: the rows.
        share: the part's rows of the batch's.
        observer: sees the reductions of the losses, or corrects them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(losses.tracking_shares(model, share))
        if observer is not None:
            stack.enter_context(losses.correcting(observer))
        return model.test_step(data)


def cannot_step(model: Any) -> str:
    """Why the engine cannot take this model's steps; empty where it can."""
    name = type(model).__name__
    if _own(model, "make_train_function"):
        return f"{name} has a make_train_function of its own"
    if isinstance(model.train_step, tf.types.experimental.PolymorphicFunction):
        return f"the train_step of {name} is a tf.function of its own"
    if not optimizers_of(model):
        return f"{name} keeps no optimizer that Keras knows"
    return ""


def cannot_cut(model: Any) -> str:
    """Why no batch of this model can be cut, as far as it is known without trying."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            return (
                f"its layer {layer.name} is stateful: it keeps a state for each row of "
                "a whole batch"
            )
    return ""


def loss_of(model: Any, **batch: Any) -> Any:
    """The model's total loss of a batch: x, y, y_pred and sample_weight."""
    # Keras 3.3 has only the method that users override; later ones reach it through
    # another, which knows whether the override takes ``training``.
    compute = getattr(model, "_compute_loss", None) or model.compute_loss
    return compute(**batch)


def loss_of_part(model: Any, data: Any, observer: Any) -> tf.Tensor:
    """The loss of a part, not training, its reductions seen by ``observer``."""
    x, y, sample_weight = unpack(data)
    mode = {"training": False} if model._call_has_training_arg else {}
    predictions = model(x, **mode)
    with losses.correcting(observer), losses.tracking_nothing(model):
        return loss_of(model, x=x, y=y, y_pred=predictions, sample_weight=sample_weight)


@contextlib.contextmanager
def loss_multiplied(model: Any, factor: Any) -> Iterator[None]:
    """Has the model's loss multiplied while the block traces; None: as it is."""
    if factor is None:
        yield
        return
    name = "_compute_loss" if hasattr(model, "_compute_loss") else "compute_loss"
    original = getattr(model, name)

    def multiplied(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        # A value for each sample is a sum already: tapes add its gradients up.
        return loss * tf.cast(factor, loss.dtype) if loss.shape.rank == 0 else loss

    kept = vars(model).get(name)
    vars(model)[name] = multiplied
    try:
        yield
    finally:
        if kept is None:
            del vars(model)[name]
        else:
            vars(model)[name] = kept
