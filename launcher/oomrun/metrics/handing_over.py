"""Metrics for those who do not scrape: a file for node_exporter, a Pushgateway.

Covers: writing the file again and again, pushing once. Does not cover: what is
measured (``catalogue.py``).

Neither may hurt the run: what fails is said once in the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from prometheus_client import push_to_gateway, write_to_textfile

from oomrun.core.machine import MachineReading
from oomrun.core.state import JobState
from oomrun.metrics.catalogue import registry_of

__all__ = ["Textfile", "push"]

_EVERY_S = 15.0
_PUSH_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class Textfile:
    """Writes the file now and then, and a last time when it is closed.

    Each time another file is renamed over it, so that no reader sees half of one.
    """

    def __init__(
        self,
        path: Path,
        current_state: Callable[[], JobState],
        machine: Callable[[], MachineReading | None] = lambda: None,
    ) -> None:
        self._path = path
        self._registry = registry_of(lambda: [current_state()], machine)
        self._ending = threading.Event()
        self._failed = False
        self._thread = threading.Thread(
            target=self._keep_writing, name="oomrun-textfile", daemon=True
        )

    def __enter__(self) -> Textfile:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        # A file system that hangs must not keep the run from its end.
        self._thread.join(_EVERY_S)

    def _keep_writing(self) -> None:
        while not self._ending.is_set():
            self._write()
            self._ending.wait(_EVERY_S)
        self._write()

    def _write(self) -> None:
        try:
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            if not self._failed:
                why = (error.strerror or str(error)).lower()
                _log.warning("metrics cannot be written to %s: %s", self._path, why)
            self._failed = True
        else:
            self._failed = False


def push(url: str, state: JobState) -> None:
    """Tells the Pushgateway at ``url`` how the run stands; it waits 10 s at most."""
    try:
        push_to_gateway(
            url,
            job="oomrun",
            registry=registry_of(lambda: [state]),
            grouping_key={"run": state.name},
            timeout=_PUSH_TIMEOUT_S,
        )
    except (OSError, ValueError) as error:
        _log.warning("the metrics could not be pushed to %s: %s", url, error)
