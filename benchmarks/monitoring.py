"""What watching costs. Prints JSON.

    PYTHONPATH=tests python -m benchmarks.monitoring [--seconds 60] [--scrapes 40]

Covers: a supervisor of eight devices with a scrape every 5 s; a scrape of 16 such runs
from `oomrun monitor`; what each event costs those who see it; the live view. GPUs are
those of the tests' NVML library under the real pynvml, and workers report without
training.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pty
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import nvml_library
import scenarios
from oomrun import known_runs
from oomrun.cli.monitored import Monitored
from oomrun.cli.view import make_observer
from oomrun.core import events as ev
from oomrun.core.machine import MachineReading
from oomrun.core.state import JobState, replay
from oomrun.devices.sampling import read_host
from oomrun.journal import Journal
from oomrun.metrics.catalogue import registry_of
from oomrun.metrics.exposition import Encoders
from oomrun.rundir import RunDir

DEVICES, RUNS = 8, 16
SCRAPE_EVERY_S = 5.0
EVENTS = 2000
JOB = f"""\
name: watched
script: train.py
strategy: horovod
devices: gpu
batch: {{global: {32 * DEVICES}}}
metrics: {{listen: "127.0.0.1:0"}}
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scrapes", type=int, default=40)
    # How the benchmark calls itself for the other processes.
    parser.add_argument("--as", choices=("supervisor", "worker"), dest="role")
    args = parser.parse_args()
    if args.role == "supervisor":
        sys.exit(_supervise())
    if args.role == "worker":
        _report_until_stopped()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "load_average": os.getloadavg()[0],
            "supervisor": supervisor(Path(folder) / "one", args.seconds),
            "monitor": monitor(Path(folder) / "many", args.scrapes),
            "state_after_us": fold_us(),
            "observer_us": {
                form: per_event_us(make_observer(io.StringIO(), force=form))
                for form in ("plain", "json")
            },
            "live_view": [live_share(1), live_share(10)],
        }
    print(json.dumps(result, indent=2))


# --- one supervisor -----------------------------------------------------------------


def supervisor(folder: Path, seconds: float) -> dict[str, Any]:
    """Processor time and memory of a real supervisor whose run is scraped."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").touch()
    library = nvml_library.build(folder / "nvml")
    machine = nvml_library.Machine(library, folder / "machine.txt", gpus=DEVICES)
    for gpu in range(DEVICES):
        machine.change({f"{gpu}.{what}": 50 for what in _TOLD})
    with _process(folder, machine.environment(), "--as", "supervisor") as process:
        url = _url_of(process, RunDir(folder / "runs" / "watched"))
        watched = psutil.Process(process.pid)
        _wait_for_devices(url)
        before, began = watched.cpu_times(), time.monotonic()
        took_ms, size, memory = [], 0, 0
        while (now := time.monotonic()) < began + seconds:
            text = _get(url)
            took_ms.append((time.monotonic() - now) * 1e3)
            size, memory = len(text), max(memory, watched.memory_info().rss)
            time.sleep(SCRAPE_EVERY_S)
        after, passed = watched.cpu_times(), time.monotonic() - began
    busy = after.user + after.system - before.user - before.system
    return {
        "devices": DEVICES,
        "seconds": round(passed, 1),
        "share_of_a_core": round(busy / passed, 4),
        "resident_mb": round(memory / 1e6, 1),
        "scrape_bytes": size,
        "scrape_median_ms": round(statistics.median(took_ms), 1),
    }


_TOLD = ("utilization", "temperature", "power")


@contextlib.contextmanager
def _process(
    folder: Path, env: dict[str, str], *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.monitoring", *options], cwd=folder,
            env={**env, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder / "state")},
            stdout=said, stderr=said,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _url_of(process: subprocess.Popen[bytes], run_dir: RunDir) -> str:
    """Where the process listens: it says so only where it was not asked for a port."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and run_dir.journal.exists():
                port = connection.laddr.port
                with contextlib.suppress(OSError):
                    url = f"http://127.0.0.1:{port}/metrics"
                    _get(url)
                    return url
        time.sleep(0.1)
    raise TimeoutError("the supervisor does not listen")


def _wait_for_devices(url: str) -> None:
    until = time.monotonic() + 120
    while _get(url).count(b"\noomrun_device_memory_peak_bytes{") < DEVICES:
        if time.monotonic() > until:
            raise TimeoutError(f"{DEVICES} devices are not told of")
        time.sleep(0.2)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        found: bytes = reply.read()
    return found


def _supervise() -> int:
    """The real command, but for the program that its workers are."""
    from oomrun import launching
    from oomrun.cli import main as oomrun

    class Job(launching.Job):
        def __init__(self, **settings: Any) -> None:
            ours = (sys.executable, "-m", "benchmarks.monitoring", "--as", "worker")
            timing = dataclasses.replace(settings["timing"], kill_after_s=0.5)
            super().__init__(**{**settings, "worker_argv": ours, "timing": timing})

    launching.Job = Job  # type: ignore[misc]
    return oomrun(["run", "job.yaml", "--view", "plain", "--grace", "1s"])


def _report_until_stopped() -> None:
    """Once a second, all devices' memory, as a worker tells it; only rank 0 does."""
    told = Path(os.environ["OOMRUN_LAUNCH_FILE"])
    launch = json.loads(told.read_text())
    # What this worker was told has its own device alone.
    plan = json.loads((told.parent / "plan.json").read_text())
    channel = socket.socket(fileno=int(os.environ["OOMRUN_CHANNEL_FD"]))
    devices = [device["id"] for device in plan["devices"]]

    def say(kind: str, **fields: Any) -> None:
        body = {"v": 1, "type": kind, "at": time.time(), "attempt": 1, **fields}
        channel.sendall(json.dumps(body).encode() + b"\n")

    say("worker_ready", rank=launch["rank"], pid=os.getpid(), tensorflow="-",
        keras="-", start_s=0.0)  # fmt: skip
    for step in range(1, 100_000):
        if launch["rank"] == 0:
            say(
                "progressed", fit=1, step=step, samples=step, epoch=1,
                step_in_epoch=step, loss=1 / step, window_steps=1, step_s=1.0,
                global_batch_size=32 * DEVICES, micro_batch_size=32,
                memory=[
                    {"device": name, "in_use_bytes": 2**30, "peak_bytes": 2**31}
                    for name in devices
                ],
            )  # fmt: skip
        time.sleep(1)


# --- many runs ----------------------------------------------------------------------


def monitor(folder: Path, scrapes: int) -> dict[str, Any]:
    """Scrapes of `oomrun monitor` while 16 runs train."""
    folder.mkdir()
    state = eight_devices_events()
    with contextlib.ExitStack() as stack:
        journals = []
        for number in range(RUNS):
            run_dir = RunDir(folder / f"run-{number}")
            run_dir.create()
            stack.enter_context(run_dir.locked())
            journal = stack.enter_context(Journal(run_dir.journal))
            journals.append(journal)
            for event in _named(state, number):
                journal.append(event)
            folders = known_runs.folders_of({"XDG_STATE_HOME": str(folder / "state")})
            known_runs.register(run_dir, folders[:1])
        process = stack.enter_context(_monitor_process(folder))
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1].decode()
        text = _get(url)
        assert text.count(b"\noomrun_device_memory_peak_bytes{") == RUNS * DEVICES
        watched = psutil.Process(process.pid)
        took_ms, began = [], watched.cpu_times()
        for scrape in range(scrapes):
            for journal in journals:
                journal.append(_progress(scrape))
            before = time.perf_counter()
            text = _get(url)
            took_ms.append((time.perf_counter() - before) * 1e3)
        ended = watched.cpu_times()
        memory = watched.memory_info().rss
        here_ms = sorted(_scrapes_here(folders[:1], journals, scrapes))
    busy = ended.user + ended.system - began.user - began.system
    return {
        "runs": RUNS,
        "devices_each": DEVICES,
        "bytes": len(text),
        "median_ms": round(statistics.median(took_ms), 1),
        "best_ms": round(min(took_ms), 1),
        "processor_ms": round(busy / scrapes * 1e3, 1),
        # The same within this process, where single scrapes can be told apart.
        "processor_best_ms": round(here_ms[0], 1),
        "processor_median_ms": round(statistics.median(here_ms), 1),
        "resident_mb": round(memory / 1e6, 1),
    }


def _scrapes_here(
    folders: list[Path], journals: list[Journal], scrapes: int
) -> Iterator[float]:
    """Processor time of each scrape's text, in milliseconds."""
    runs = Monitored(folders, keep_s=900)
    registry = registry_of(runs.states, lambda: MachineReading(host=read_host()))
    encode, _ = Encoders().choose("")
    encode(registry)
    for scrape in range(scrapes):
        for journal in journals:
            journal.append(_progress(scrape))
        before = time.process_time()
        encode(registry)
        yield (time.process_time() - before) * 1e3


@contextlib.contextmanager
def _monitor_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "oomrun", "monitor", "--listen", "127.0.0.1:0"],
        env={**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder / "state")},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def _named(events: list[ev.Event], number: int) -> Iterator[ev.Event]:
    for event in events:
        if isinstance(event, ev.RunStarted):
            name = f"run-{number}"
            yield replace(event, run_id=f"{number:032d}", name=name)
        else:
            yield event


def eight_devices_events() -> list[ev.Event]:
    """A run in the middle of training on eight devices."""
    first = scenarios.PLAN["devices"][0]
    plan = {
        **scenarios.PLAN,
        "devices": [
            {**first, "id": f"GPU-{i}", "kind": "gpu", "share": 32}
            for i in range(DEVICES)
        ],
    }
    started, _, *rest = scenarios.opening()
    attempt = ev.AttemptStarted(
        at=scenarios.START, attempt=1, plan=plan, pids=tuple(range(1, DEVICES + 1))
    )
    return [started, attempt, *rest, _progress(0)]


def eight_devices() -> JobState:
    """Its state."""
    return replay(eight_devices_events())


def _progress(number: int) -> ev.Progressed:
    memory = tuple(
        ev.DeviceMemory(
            device=f"GPU-{i}", in_use_bytes=2**30, peak_bytes=2**31, limit_bytes=2**34
        )
        for i in range(DEVICES)
    )
    return scenarios.progressed(6 + number, 10 + number, memory=memory)


# --- those who see events -----------------------------------------------------------


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


if __name__ == "__main__":
    main()
