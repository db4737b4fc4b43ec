"""Strategy horovod: a worker that is slower is given less, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import jobs

from oomrun.core import events as ev
from oomrun.core.state import replay

# Each pass of worker 1 has much more to compute, which changes nothing.
SCRIPT = """
import os
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(250, 24))
y = np.sin(x @ random.normal(size=(24, 1)))
rank = os.environ.get("OOMRUN_RANK", "0")
class Burden(keras.layers.Layer):
    def call(self, x):
        if rank == "1":
            large = tf.stop_gradient(tf.ones([300, 300], x.dtype) * x[0, 0] ** 2)
            for _ in range(8):
                large = tf.linalg.matmul(large, large) / 300
            x = x + tf.minimum(tf.reduce_sum(large), 0.0)
        return x
model = keras.Sequential([
    keras.Input((24,)), keras.layers.Dense(64, "tanh"), Burden(), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=96, epochs=6, verbose=0).history
values = [np.asarray(history[name]) for name in ("loss", "mae")]
np.savez(f"weights-{rank}.npz", *model.get_weights(), *values)
"""


def test_who_is_slower_does_less(tmp_path: Path) -> None:
    more = "strategy: horovod\ndevices: {cpu: 2, memory: 300MiB}\nbatch: {micro: 16}\n"
    run = jobs.make(tmp_path, SCRIPT, more)
    assert run.run() == 0, run.everything()
    of: dict[str, list[int]] = {"cpu:0": [], "cpu:1": []}
    for planned in run.events(ev.SharePlanned):
        of[planned.device].append(planned.share)
        assert planned.micro_batch_size <= 16
    assert (of["cpu:0"][0], of["cpu:1"][0]) == (48, 48)
    assert of["cpu:1"][-1] < of["cpu:0"][-1], of
    assert of["cpu:1"][-1] + of["cpu:0"][-1] == 96
    assert set(replay(run.events()).peaks) == {"cpu:0", "cpu:1"}
    (plain := tmp_path / "plain").mkdir()
    jobs.python(tmp_path / "train.py", cwd=plain)
    weights = [tmp_path / f"weights-{rank}.npz" for rank in range(2)]
    assert jobs.identical(*weights)
    assert jobs.distance(weights[0], plain / "weights-0.npz") < 1e-10
