"""A worker that leaves at once leaves no files, and runs nothing of the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, sys
import tensorflow as tf
from oomrun.worker.leaving import leave

@tf.function
def step(x):
    if tf.reduce_sum(x) > 0:
        x = x + 1
    return x

atexit.register(lambda: open("exit-handler", "w"))
step(tf.ones(2))
print([name for name in sys.modules if "autograph_generated" in name])
print("last words", end="")
try:
    leave(7)
finally:
    open("finally", "w")
"""


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (kept := tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 7, ended.stderr
    made, last = ended.stdout.splitlines()
    assert "generated" in made, "AutoGraph makes no such files any more"
    assert last == "last words"
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "tmp"}
    assert not list(kept.iterdir())
