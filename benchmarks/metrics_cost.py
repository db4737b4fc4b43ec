"""What watching costs: one scrape, and one event of every observer. Prints JSON.

PYTHONPATH=launcher:tests python benchmarks/metrics_cost.py
"""

from __future__ import annotations

import io
import json
import os
import pty
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import scenarios
from oomrun import metrics
from oomrun.cli.view import make_observer
from oomrun.core import events as ev
from oomrun.core.state import JobState, replay

DEVICES = 8
SCRAPES = 50
EVENTS = 2000


def eight_devices() -> JobState:
    """A run in the middle of training on eight devices."""
    first = scenarios.PLAN["devices"][0]
    plan = {
        **scenarios.PLAN,
        "devices": [
            {**first, "id": f"GPU-{i}", "kind": "gpu", "share": 32}
            for i in range(DEVICES)
        ],
    }
    memory = tuple(
        ev.DeviceMemory(
            device=f"GPU-{i}", in_use_bytes=2**30, peak_bytes=2**31, limit_bytes=2**34
        )
        for i in range(DEVICES)
    )
    started, _, *rest = scenarios.opening()
    attempt = ev.AttemptStarted(
        at=scenarios.START, attempt=1, plan=plan, pids=tuple(range(1, DEVICES + 1))
    )
    progress = scenarios.progressed(6, 10, memory=memory)
    return replay([started, attempt, *rest, progress])


def scrape() -> dict[str, Any]:
    """Time of a scrape over HTTP, and its size."""
    state = eight_devices()
    took_s, size = [], 0
    with metrics.start("127.0.0.1", 0, lambda: state) as exporter:
        for _ in range(SCRAPES):
            started = time.perf_counter()
            with urllib.request.urlopen(exporter.url, timeout=10) as reply:
                size = len(reply.read())
            took_s.append(time.perf_counter() - started)
    return {
        "devices": DEVICES,
        "bytes": size,
        "median_ms": round(statistics.median(took_s) * 1e3, 2),
        "max_ms": round(max(took_s) * 1e3, 2),
    }


def per_event_us(see: Callable[[JobState, ev.Event], None]) -> float:
    """Processor time of the whole process per event, in microseconds."""
    state = eight_devices()
    event = scenarios.progressed(7, 15)
    started = time.process_time()
    for _ in range(EVENTS):
        see(state, event)
    return round((time.process_time() - started) / EVENTS * 1e6, 1)


def fold_us() -> float:
    """Processor time of ``JobState.after`` per progress event."""
    state = eight_devices()
    started = time.process_time()
    for step in range(EVENTS):
        state = state.after(scenarios.progressed(7, 15 + step))
    return round((time.process_time() - started) / EVENTS * 1e6, 1)


def live_share(events_per_s: float) -> dict[str, float]:
    """Processor time of the live view while so many events a second arrive."""
    outer, inner = pty.openpty()
    reader = threading.Thread(target=_drain, args=(outer,), daemon=True)
    reader.start()
    state = eight_devices()
    seconds = 5.0
    with os.fdopen(inner, "w") as stream, make_observer(stream, force="live") as see:
        busy, until = time.process_time(), time.monotonic() + seconds
        while time.monotonic() < until:
            see(state, scenarios.progressed(7, 15))
            time.sleep(1 / events_per_s)
        share = (time.process_time() - busy) / seconds
    return {"events_per_s": events_per_s, "share_of_a_core": round(share, 4)}


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            continue
    except OSError:
        return


def main() -> None:
    """Measures and prints."""
    result = {
        "scrape": scrape(),
        "state_after_us": fold_us(),
        "observer_us": {
            form: per_event_us(make_observer(io.StringIO(), force=form))
            for form in ("plain", "json")
        },
        "live_view": [live_share(1), live_share(10)],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
