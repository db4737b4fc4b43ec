"""What all tests share: they run in any order, many in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


# What their first test makes serves all of a module: each goes to one of the processes
# that share the tests.
_TOGETHER = (
    "tests/engine/test_compatibility.py",
    "tests/unit/test_device_modes.py",
    "tests/unit/test_monitoring_history.py",
    "tests/unit/test_packaging.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test to whichever process is free, but for ``_TOGETHER``.

    The mark ``xdist_group`` would say the same, but pytest-xdist 3.8 writes it into an
    attribute that pytest 9.2 no longer reads, and says nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if module in _TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_report_header() -> str:
    """Which cells of the fault matrix are drawn; ``tests/e2e/matrix.py`` draws them."""
    return f"OOMRUN_MATRIX_SEED: {os.environ.get('OOMRUN_MATRIX_SEED', '7')}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What failed and then passed is told in full: it is a race, ours or the test's."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed, and run again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session", autouse=True)
def _lists_its_runs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The runs of tests are no runs of whoever tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def float64() -> Iterator[None]:
    """Keras in double precision, for ``pytest.mark.usefixtures``.

    Graphs are run as they are traced: to optimize each takes a third of such a test's
    time. The compatibility table and the e2e tests have them optimized.
    """
    import keras
    import tensorflow as tf

    from precision import precision

    def optimize(wanted: bool) -> None:
        options = {"disable_meta_optimizer": not wanted}
        tf.config.optimizer.set_experimental_options(options)

    optimize(False)
    with precision("float64"):
        yield
    optimize(True)
    keras.backend.clear_session()


@pytest.fixture(autouse=True)
def _leaves_keras_as_it_was() -> Iterator[None]:
    """Fails the test that changes the precision of those behind it."""
    yield
    if keras := sys.modules.get("keras"):
        from precision import use_precision

        left = (keras.config.floatx(), keras.config.dtype_policy().name)
        use_precision("float32")
        assert left == ("float32", "float32"), "this test left Keras in its precision"
