"""Rows: every optimizer of Keras, and what is set on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import optimizers

from engine.registry import row, section
from engine.samples import compiled, fit, regression

section("Optimizers")


def _trained(optimizer: Any) -> Any:
    model = compiled(optimizer)
    return fit(model, *regression()), model


@row("SGD", slow=True)
def sgd(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1))


@row("SGD with momentum; with Nesterov's", slow=True)
def momentum(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, 0.9, nesterov=True))


@row("Adam, AMSGrad")
def adam(folder: Path) -> Any:
    return _trained(optimizers.Adam(0.01, amsgrad=True))


@row("AdamW, with variables excluded from decay", slow=True)
def adamw(folder: Path) -> Any:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return _trained(optimizer)


@row("Adafactor")
def adafactor(folder: Path) -> Any:
    return _trained(optimizers.Adafactor(0.01))


@row("Adamax, Nadam", slow=True)
def nadam(folder: Path) -> Any:
    return _trained(optimizers.Adamax(0.01)), _trained(optimizers.Nadam(0.01))


@row("Adagrad, Adadelta", slow=True)
def adagrad(folder: Path) -> Any:
    return _trained(optimizers.Adagrad(0.01)), _trained(optimizers.Adadelta(0.01))


@row("RMSprop, centred, with momentum", slow=True)
def rmsprop(folder: Path) -> Any:
    return _trained(optimizers.RMSprop(0.01, momentum=0.5, centered=True))


@row("Ftrl", slow=True)
def ftrl(folder: Path) -> Any:
    return _trained(optimizers.Ftrl(0.01, l1_regularization_strength=0.01))


@row("Lion")
def lion(folder: Path) -> Any:
    return _trained(optimizers.Lion(0.01))


@row("Lamb", slow=True)
def lamb(folder: Path) -> Any:
    return _trained(optimizers.Lamb(0.01))


@row("Muon")
def muon(folder: Path) -> Any:
    return _trained(optimizers.Muon(0.01))


@row("clipping by norm")
def clipnorm(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, clipnorm=0.05))


@row("clipping by value", slow=True)
def clipvalue(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, clipvalue=0.01))


@row("clipping by global norm", slow=True)
def global_clipnorm(folder: Path) -> Any:
    return _trained(optimizers.Adam(0.1, global_clipnorm=0.05))


@row("weight decay on any optimizer", slow=True)
def weight_decay(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, weight_decay=0.1))


@row("EMA of the weights, overwritten every two steps")
def ema(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))


@row("EMA, written at the end of the training", slow=True)
def ema_at_end(folder: Path) -> Any:
    model = compiled(optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=None))
    history = fit(model, *regression())
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return history, model


@row("learning-rate schedule", slow=True)
def schedule(folder: Path) -> Any:
    decay = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return _trained(optimizers.Adam(decay))


@row("learning-rate schedule with warm-up and restarts")
def schedule_warmup(folder: Path) -> Any:
    cosine = optimizers.schedules.CosineDecay(0.0, 4, warmup_target=0.1, warmup_steps=2)
    return _trained(optimizers.SGD(cosine))


@row("`gradient_accumulation_steps` of Keras")
def gradient_accumulation(folder: Path) -> Any:
    return _trained(optimizers.SGD(0.1, gradient_accumulation_steps=2))


@row("`LossScaleOptimizer` around any optimizer")
def loss_scale(folder: Path) -> Any:
    return _trained(optimizers.LossScaleOptimizer(optimizers.SGD(0.1), 2.0**8))


@row("an optimizer class of the user's")
def own_optimizer(folder: Path) -> Any:
    class Signs(keras.optimizers.Optimizer):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            step = keras.ops.sign(gradient) * keras.ops.cast(
                learning_rate, gradient.dtype
            )
            self.assign_sub(variable, step)

    return _trained(Signs(0.01))
