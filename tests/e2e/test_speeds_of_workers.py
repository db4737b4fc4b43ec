"""Strategy horovod: a worker that is slower is given less, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import jobs
import several_workers

from oomrun.core.state import replay

# Each pass of worker 1 has much more to compute, which changes nothing.
SCRIPT = (
    several_workers.START
    + """
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
)


def test_who_is_slower_does_less(tmp_path: Path) -> None:
    more = "strategy: horovod\ndevices: {cpu: 2, memory: 300MiB}\nbatch: {micro: 16}\n"
    run = jobs.make(tmp_path, SCRIPT, more)
    assert run.run() == 0, run.everything()
    first, second = (several_workers.shares(run, f"cpu:{n}") for n in (0, 1))
    assert all(size <= 16 for _, size in (*first, *second))
    assert (first[0][0], second[0][0]) == (48, 48)
    assert second[-1][0] < first[-1][0], (first, second)
    assert second[-1][0] + first[-1][0] == 96
    assert set(replay(run.events()).peaks) == {"cpu:0", "cpu:1"}
    plain = several_workers.alone(tmp_path / "plain", SCRIPT)
    several_workers.trained_as_one(run, plain, 2)
