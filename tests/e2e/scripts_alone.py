"""What a script does by itself: plain Python, which imports TensorFlow once for many.

To import it takes most of the time of a small script. So a process imports it and does
nothing else; each script runs in a fork of that, made before TensorFlow has begun
anything.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["run"]

# TensorFlow, Keras, Python and the loader read these once, or may.
_READ_EARLY = ("TF_", "KERAS_", "XLA_", "CUDA_", "PYTHON", "LD_", "MALLOC_")
_started: list[_Importer] = []


def run(
    script: Path, args: Sequence[str], cwd: Path, env: Mapping[str, str]
) -> tuple[int, str]:
    """``python script args`` in ``cwd`` with just this environment.

    Returns:
        The exit code, negative for a signal, and all that was printed.
    """
    early = {key: env[key] for key in env if key.startswith(_READ_EARLY)}
    importer = next((one for one in _started if one.early == early), None)
    if importer is None:
        importer = _Importer(env, early)
        _started.append(importer)
        atexit.register(importer.end)
    return importer.run(script, args, cwd, env)


class _Importer:
    """The process that has imported TensorFlow."""

    def __init__(self, env: Mapping[str, str], early: Mapping[str, str]) -> None:
        self.early = early
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def run(
        self, script: Path, args: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> tuple[int, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder) / "printed"
            asked = {
                "argv": [str(script), *args],
                "cwd": str(cwd),
                "env": dict(env),
                "printed": str(printed),
            }
            try:
                print(json.dumps(asked), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
            except BaseException:  # a test's time is up
                self.end()
                raise
            assert answer, "Python could not import TensorFlow, or fork"
            return int(answer), printed.read_text(errors="replace")

    def end(self) -> None:
        """Ends it, and a script that still runs."""
        if self in _started:
            _started.remove(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _serve() -> None:
    # What TensorFlow prints meanwhile is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import keras
    import tensorflow

    del keras, tensorflow
    for line in sys.stdin:
        with warnings.catch_warnings():
            # Of threads that a fork does not have. They are OpenBLAS's, which knows.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            answers.close()
            _become(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(asked: dict[str, Any]) -> None:
    """Runs the script in this process, as ``python`` does."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(asked["printed"], os.O_WRONLY | os.O_CREAT)
    for given, taken in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(given, taken)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["argv"]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
