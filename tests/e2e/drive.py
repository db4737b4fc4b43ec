"""The ``oomrun run`` of tests: the real one, but for the worker program it starts.

Usage: drive.py WORKER_MODE JOB [options of run]
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from oomrun import hosts, launching
from oomrun.cli import host_agent, main

WORKER = Path(__file__).with_name("killable_worker.py")


class Job(launching.Job):
    """A job whose worker is ours, and that waits less."""

    def __init__(self, **settings: Any) -> None:
        mode = os.environ["DRIVE_MODE"]
        settings["worker_argv"] = (sys.executable, str(WORKER), mode)
        settings["timing"] = dataclasses.replace(
            settings["timing"],
            kill_after_s=0.5,
            linger_s=0.5,
            failed_linger_s=0.5,
            progress_every_s=float(os.environ.get("PROGRESS_EVERY_S", "0.1")),
        )
        super().__init__(**settings)


def agent() -> int:
    """The same on another host."""
    launching.Job = Job  # type: ignore[misc]
    return host_agent.main()


if __name__ == "__main__":
    os.environ["DRIVE_MODE"] = sys.argv[1]
    launching.Job = Job  # type: ignore[misc]
    hosts.AGENT = "drive_agent"
    sys.exit(main(sys.argv[2:]))
