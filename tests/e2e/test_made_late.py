"""What a script makes, or asks for, only when training is under way."""

from __future__ import annotations

from pathlib import Path

import jobs

START = """
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x, xv = random.normal(size=(100, 8)), random.normal(size=(45, 8))
y, yv = np.sin(x.sum(1, keepdims=True)), np.cos(xv.sum(1, keepdims=True))
found = {}
def fit(name, model, optimizer="adam", **how):
    model.compile(optimizer, "mse", steps_per_execution=how.pop("together", 1))
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, **how).history
    found.update({f"{name} {key}": value for key, value in history.items()})
    for index, weight in enumerate([*model.weights, *model.optimizer.variables]):
        found[f"{name} {index}"] = weight.numpy()
def network(*more):
    layers = [keras.Input((8,)), *more, keras.layers.Dense(1)]
    return keras.Sequential(layers)
"""

# Each is made in the step's first trace: nothing of it may wait for what the engine
# does in a step.
VARIABLES = (
    START
    + """
class Noise(keras.layers.Layer):
    def call(self, v, training=False):
        return v + keras.random.normal(keras.ops.shape(v)) if training else v
class Counts(keras.layers.Layer):
    seen = None
    def call(self, v, training=False):
        if training and self.seen is None:
            self.seen = tf.Variable(tf.ones((8,), tf.float64))
        return v * self.seen if training else v
class Auxiliary(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.more, self.last = (keras.layers.Dense(n) for n in (4, 4, 1))
    def call(self, v, training=False):
        v = self.first(v)
        return self.last(self.more(v) if training else v)
class Restless(keras.optimizers.SGD):
    def update_step(self, gradient, variable, rate):
        super().update_step(gradient, variable, rate)
        self.assign_add(variable, 0.01 * keras.random.normal(variable.shape))
fit("noise", network(Noise()))
fit("counts", network(Counts()))
fit("auxiliary", Auxiliary())
fit("restless", network(), Restless(0.01))
np.savez("weights.npz", **found)
"""
)

VALIDATES = (
    START
    + """
class Within(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            other = network()
            other.compile("adam", "mse")
            other.fit(xv, yv, batch_size=16, epochs=2, verbose=0)
            found["trained within"] = other.get_weights()[0]
            found["seen within"] = other.evaluate(xv, yv, batch_size=16, verbose=0)
class Scales(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        xv[...] = (xv - x.mean(0)) / x.std(0)
asked = {"validation_data": (xv, yv)}
fit("within", network(), callbacks=[Within()], **asked)
fit("within, together", network(), callbacks=[Within()], together=4, **asked)
fit("scales", network(), callbacks=[Scales()], **asked)
np.savez("weights.npz", **found)
"""
)


def as_plain(folder: Path, script: str) -> None:
    job = jobs.make(folder, script, "devices: {cpu: 1, memory: 150MiB}\n")
    assert job.run() == 0, job.everything()
    (plain := folder / "plain").mkdir()
    jobs.python(folder / "train.py", cwd=plain)
    apart = jobs.distance(folder / "weights.npz", plain / "weights.npz")
    assert apart == 0, job.everything()


def test_variables_that_a_step_makes(tmp_path: Path) -> None:
    as_plain(tmp_path, VARIABLES)


def test_what_callbacks_do_with_validation_arrays(tmp_path: Path) -> None:
    as_plain(tmp_path, VALIDATES)
