"""Adafactor without the slot that it does not need.

Keras's own keeps a velocity of each weight's full size beside the means of rows and
columns, so it has half of Adam's state. For a weight of two and more dimensions that
velocity is made anew from the two in each step: here it is a temporary tensor.

The numbers are those of ``keras.optimizers.Adafactor`` but for rounding, and where that
makes NaN: rows and columns without any gradient (ReLUs that never fire) have a velocity
that is too small for float32, and 0 / 0 is their step. Here roots are taken before they
are multiplied, so that it is 0.
Source of what is relied on: keras/src/optimizers/adafactor.py, 3.3 to 3.15.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.src import api_export

__all__ = ["Adafactor"]


class Adafactor(keras.optimizers.Adafactor):  # type: ignore[misc]
    """Saved in a model's file it is Keras's own, so that no file needs oomrun."""

    def build(self, variables: Any) -> None:
        """Makes row and column means, and of vectors the velocity."""
        if self.built:
            return
        keras.optimizers.Optimizer.build(self, variables)
        self._r, self._c, self._v = [], [], []
        for variable in variables:
            row = column = velocity = None
            if self._overwrite_variable_with_gradient(variable):
                pass
            elif len(variable.shape) < 2:
                velocity = self.add_variable_from_reference(variable, name="velocity")
            else:
                of = {"dtype": variable.dtype, "name": variable.name}
                shape = tuple(variable.shape)
                row = self.add_variable(shape=shape[:-1], **of)
                column = self.add_variable(shape=(*shape[:-2], shape[-1]), **of)
            self._r.append(row)
            self._c.append(column)
            self._v.append(velocity)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One step, in the order of Keras's own."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        least = ops.cast(self.epsilon_2, variable.dtype)
        step = ops.cast(self.iterations + 1, variable.dtype)
        if not callable(self._learning_rate) and self.relative_step:
            rate = ops.minimum(rate, 1 / ops.sqrt(step))
        rate = ops.minimum(rate, 1 / ops.sqrt(step))
        rate = ops.maximum(least, self._rms(variable)) * rate
        kept = ops.subtract(1, ops.power(step, self.beta_2_decay))
        square = ops.add(ops.square(gradient), self.epsilon_1)
        change = self._scaled(gradient, variable, square, kept)
        one = ops.cast(1.0, variable.dtype)
        large = ops.maximum(one, self._rms(change) / self.clip_threshold)
        self.assign_sub(variable, rate * (change / large))

    def _scaled(self, gradient: Any, variable: Any, square: Any, kept: Any) -> Any:
        """The gradient by the root of its velocity."""
        index = self._get_variable_index(variable)
        if len(variable.shape) < 2:
            return gradient * ops.rsqrt(self._averaged(self._v[index], square, kept))
        rows = self._averaged(self._r[index], ops.mean(square, axis=-1), kept)
        columns = self._averaged(self._c[index], ops.mean(square, axis=-2), kept)
        mean = ops.sqrt(ops.mean(rows, axis=-1, keepdims=True))
        gradient = gradient * ops.expand_dims(ops.rsqrt(columns), -2)
        return gradient * ops.expand_dims(ops.rsqrt(rows) * mean, -1)

    def _averaged(self, slot: Any, value: Any, kept: Any) -> Any:
        moved = kept * slot + ops.subtract(1, kept) * value
        self.assign(slot, moved)
        return moved


# By its name, in files of models, it is the one that it stands for.
api_export.REGISTERED_OBJS_TO_NAMES[Adafactor] = "keras.optimizers.Adafactor"
