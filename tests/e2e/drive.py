"""The ``oomrun run`` of tests: the real one, but for the worker program it starts.

Usage: drive.py WORKER_MODE JOB [options of run]
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from oomrun import attempts, launching
from oomrun.cli import main

WORKER = Path(__file__).with_name("killable_worker.py")


class Job(launching.Job):
    """A job whose worker is ours, and that waits less."""

    def __init__(self, **settings: Any) -> None:
        settings["worker_argv"] = (sys.executable, str(WORKER), sys.argv[1])
        settings["timing"] = dataclasses.replace(
            settings["timing"],
            kill_after_s=0.5,
            linger_s=0.5,
            progress_every_s=float(os.environ.get("PROGRESS_EVERY_S", "0.1")),
        )
        super().__init__(**settings)


if __name__ == "__main__":
    assert attempts.Timing
    launching.Job = Job  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
