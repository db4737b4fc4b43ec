"""A script in a fork of what has imported TensorFlow is the script that Python runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import scripts_alone

LOOKS = """
import os, signal, sys
import beside
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], "PYTEST_VERSION" in os.environ)
print(__name__, sys.modules["__main__"].__file__ == __file__, sys.stdin.read() == "")
print("on stderr", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("no")
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""
# `PATH` alone: nothing of TensorFlow's is set, and nothing of what runs the tests.
ENV = {"PATH": os.environ["PATH"], "MINE": "own", "TF_CPP_MIN_LOG_LEVEL": "3"}


def test_what_it_sees_and_how_it_ends(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").touch()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(LOOKS)
    for word, wanted in (("0", 0), ("3", 3), ("raise", 1), ("kill", -signal.SIGKILL)):
        code, printed = scripts_alone.run(script, [word, "x"], tmp_path, ENV)
        assert code == wanted, printed
        assert f"['{word}', 'x'] {tmp_path} own False\n" in printed
        assert "__main__ True True\n" in printed
        assert "on stderr\n" in printed
        assert ("ValueError: no" in printed) == (word == "raise")


TRAINS = """
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 8))
model = keras.Sequential([
    keras.Input((8,)), keras.layers.Dense(32, "tanh"), keras.layers.Dropout(0.3),
    keras.layers.Dense(1),
])
model.compile("adam", "mse")
history = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0).history
np.savez("weights.npz", *model.get_weights(), history["loss"])
"""


@pytest.mark.slow
def test_it_trains_the_same_to_the_last_bit(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(TRAINS)
    for name in ("python", "fork", "again"):
        (tmp_path / name).mkdir()
    env = jobs.environment(jobs.PLAIN)
    subprocess.run(
        [sys.executable, script], cwd=tmp_path / "python", env=env, check=True
    )
    for name in ("fork", "again"):
        jobs.python(script, cwd=tmp_path / name)
        weights = (tmp_path / folder / "weights.npz" for folder in ("python", name))
        assert jobs.identical(*weights)
