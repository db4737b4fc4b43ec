"""Keras's own tests, run by pytest inside this process; each test's outcome as JSON.

    python run_suite.py OUTCOMES.json keras/src/trainers/trainer_test.py ...

A script as any other to oomrun, and it knows nothing of it: ``compare.py`` runs it
plain and under ``oomrun``. Covers: outcomes and error texts by the test's name, what
the process holds (memory, threads, files) as the tests go by. Exit code 0 once all
were run, whatever came out; a file that cannot be imported is an outcome too.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest

#: The folder that holds the package ``keras``: names of tests begin there.
ROOT = Path(keras.__file__).resolve().parents[1]
_SAMPLE_EVERY = 25


class Outcomes:
    """A pytest plugin that keeps what became of each test.

    Attributes:
        tests: by name, ``outcome`` (the worst of setup, call and teardown) and, where
            it was not passed, the last line of its ``error``.
        usage: every 25 tests, what the process held then.
    """

    _WORST = ("passed", "skipped", "failed")

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, str]] = {}
        self.usage: list[dict[str, float]] = []
        self._process = psutil.Process()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the three phases of a test is over."""
        self._note(report.nodeid, report)
        if report.when == "teardown" and len(self.tests) % _SAMPLE_EVERY == 0:
            self.sample()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was read, or could not be."""
        if report.outcome != "passed":
            self._note(report.nodeid, report)

    def _note(self, name: str, report: Any) -> None:
        before = self.tests.setdefault(name, {"outcome": "passed"})
        if self._WORST.index(report.outcome) <= self._WORST.index(before["outcome"]):
            return
        before["outcome"] = report.outcome
        before["error"] = _error(report)

    def sample(self) -> None:
        """Notes what the process holds now."""
        self.usage.append(
            {
                "tests": len(self.tests),
                "seconds": round(time.monotonic() - self._began, 1),
                "rss_bytes": self._process.memory_info().rss,
                "threads": threading.active_count(),
                "native_threads": self._process.num_threads(),
                "files": self._process.num_fds(),
            }
        )


def _error(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:500]
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E")]
    return "\n".join(lines[:6])[:1500] or str(report.longrepr)[-500:]


def _keras_conftest() -> types.ModuleType:
    """The one name that tests import from a file of Keras's that wheels leave out."""

    def skip_if_backend(name: str, reason: str) -> Any:
        return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)

    module = types.ModuleType("conftest")
    module.__dict__["skip_if_backend"] = skip_if_backend
    return module


def main() -> int:
    """Runs the tests named on the command line; returns the exit code."""
    # Answered here, since their folder may be one that nobody can write to.
    out, names = Path(sys.argv[1]), sys.argv[2:]
    sys.modules["conftest"] = _keras_conftest()
    outcomes = Outcomes()
    outcomes.sample()
    settings = Path(__file__).with_name("pytest.ini")
    code = pytest.main(
        [
            f"--config-file={settings}",
            f"--rootdir={ROOT}",
            "--continue-on-collection-errors",
            *[str(ROOT / name) for name in names],
        ],
        plugins=[outcomes],
    )
    outcomes.sample()
    out.write_text(
        json.dumps({"tests": outcomes.tests, "usage": outcomes.usage}, indent=1)
    )
    ran = (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.INTERRUPTED,
    )
    return 0 if code in ran else int(code)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
