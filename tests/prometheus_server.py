"""Debian's Prometheus on a free port, for tests that ask it something.

Covers: starting and ending it, queries. Does not cover: what it is given to scrape or
to know.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Prometheus", "wait_for"]

_LISTENING = re.compile(r'"Listening on".*? address=127\.0\.0\.1:(\d+)')


class Prometheus:
    """A Prometheus server; its data lie in ``folder/data``, made or to be made."""

    def __init__(self, folder: Path, config: str, *options: str) -> None:
        (folder / "prometheus.yml").write_text(config)
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                    *options,
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_ready, "prometheus to be ready", 60)

    def _url(self) -> str | None:
        found = _LISTENING.search(self._log.read_text())
        return f"http://127.0.0.1:{found[1]}" if found else None

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        url = self._url()
        if url is None:
            return False
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self._url()}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """Values by the values of their labels, without those a scrape adds."""
        result = self._get("query", query=expression)["result"]
        added = ("__name__", "instance", "job", "run")
        return {
            tuple(
                v for k, v in sorted(item["metric"].items()) if k not in added
            ): float(item["value"][1])
            for item in result
        }

    def history(
        self, expression: str, start: float, end: float, step_s: float
    ) -> list[dict[str, Any]]:
        """The series of ``expression`` between two moments."""
        found: list[dict[str, Any]] = self._get(
            "query_range", query=expression, start=start, end=end, step=step_s
        )["result"]
        return found

    def one(self, expression: str) -> float | None:
        """The only value of ``expression``, None while there is none."""
        values = list(self.query(expression).values())
        assert len(values) <= 1, values
        return values[0] if values else None

    def last(self, metric: str) -> float | None:
        """The last value scraped, although the target is gone."""
        return self.one(f"last_over_time({metric}[15m])")

    def exemplars(self, expression: str, start: float) -> list[dict[str, str]]:
        """The labels of the exemplars of these series since ``start``."""
        found = self._get(
            "query_exemplars", query=expression, start=start, end=time.time()
        )
        return [one["labels"] for series in found for one in series["exemplars"]]

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes, and how the last time went."""
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(30)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Waits until ``condition()`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s in vain for {what}")
        time.sleep(0.1)
