"""What Prometheus would know of a run that was scraped all along, from its journal.

Covers: the journal's states at the moments of scrapes, as OpenMetrics text with
timestamps, and a Prometheus that has it. Does not cover: checks.

``data/watched_run`` has the journal of a real run: memory ran out in a step, memory
leaked, the supervisor was killed and took over again. Its job file and script lie
beside it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.machine import Collection, GpuReading, MachineReading
from oomrun.core.state import JobState
from oomrun.devices.sampling import read_host
from oomrun.metrics.catalogue import JobStateCollector
from prometheus_server import Prometheus

__all__ = [
    "GPU", "SCRAPE_S", "as_on_gpu", "fill", "machine_with_gpus", "openmetrics",
    "watched_run",
]  # fmt: skip

SCRAPE_S = 5.0
GPU = "GPU-00000000-1111-2222-3333-444444444444"
_JOURNAL = Path(__file__).parent / "data" / "watched_run" / "journal.jsonl"


def watched_run(*, end: float) -> list[ev.Event]:
    """The events of the real run, moved so that the last one is at ``end``.

    By hand, as the run had no URL for them: its checkpoints are copied.
    """
    lines = _JOURNAL.read_text().splitlines()
    events = [event_json.from_json(json.loads(line)) for line in lines]
    later = end - events[-1].at
    found: list[ev.Event] = []
    for event in events:
        found.append(replace(event, at=event.at + later))
        if isinstance(event, ev.CheckpointSaved):
            found.append(
                ev.CheckpointMirrored(
                    at=found[-1].at, attempt=event.attempt, name=f"step-{event.step}",
                    size_bytes=event.size_bytes, duration_s=0.1,
                )
            )  # fmt: skip
    return found


def as_on_gpu(events: list[ev.Event]) -> list[ev.Event]:
    """The same run as a GPU would have journaled it, for joins by UUID."""
    text = json.dumps([event_json.to_json(event) for event in events])
    for before, after in (
        ('"cpu:0"', f'"{GPU}"'),
        ('"kind": "cpu"', '"kind": "gpu"'),
        ('"name": "watched"', '"name": "watched-gpu"'),
    ):
        assert before in text, before
        text = text.replace(before, after)
    return [event_json.from_json(item) for item in json.loads(text)]


def machine_with_gpus() -> MachineReading:
    """This host, and by hand the GPU of ``as_on_gpu`` and a part of another."""
    parent = GPU.replace("0000-1111", "0001-1111")
    gpus = (
        GpuReading(
            id=GPU, kind="gpu", model="a GPU", gpu_uuid=GPU, total_bytes=2**34,
            used_bytes=2**30, utilization=0.5, temperature_c=60, power_w=300,
        ),
        GpuReading(
            id="MIG-1", kind="mig", model="a part of a GPU", gpu_uuid=parent,
            gpu_instance_id="7", total_bytes=2**33, used_bytes=2**20,
        ),
    )  # fmt: skip
    return MachineReading(
        host=replace(
            read_host(), peak_bytes=2**20, oom_kills=0,
            pressure_s={"some": 0.5, "full": 0.1},
        ),
        gpus=gpus,
        driver_version="555.42.02",
        collections={"nvml": Collection(success=True, seconds=0.001)},
    )  # fmt: skip


def openmetrics(
    *runs: list[ev.Event], more: str = "", machine: MachineReading | None = None
) -> str:
    """The scrapes of these runs, and of the machine that the last one runs on.

    ``more`` is put at the end. The parts of a histogram are series like others:
    Prometheus keeps them so too, and adds the instance that it scraped.
    """
    series: dict[str, list[str]] = {}
    for events in runs:
        told = machine if events is runs[-1] else None
        for moment, state in _scrapes(events):
            collector = JobStateCollector(
                lambda state=state: [state],  # type: ignore[misc]
                lambda told=told: told,  # type: ignore[misc]
            )
            for family in collector.collect():
                for sample in family.samples:
                    named = {**sample.labels, "instance": state.name}
                    labels = ",".join(
                        f"{name}={json.dumps(value)}" for name, value in named.items()
                    )
                    line = f"{sample.name}{{{labels}}}"
                    value = f"{float(sample.value)!r} {moment:.3f}"
                    series.setdefault(line, []).append(value)
    # A series' samples must stand together, and it must end with this word.
    body = "\n".join(
        f"{line} {value}"
        for line, values in series.items()
        for value in dict.fromkeys(values)
    )
    return f"{body}\n{more}# EOF\n"


def _scrapes(events: list[ev.Event]) -> Iterator[tuple[float, JobState]]:
    """Every few seconds from the first event to just after the last."""
    state, waiting = JobState(), list(events)
    moment = events[0].at
    while waiting:
        while waiting and waiting[0].at <= moment:
            state = state.after(waiting.pop(0))
        yield moment, state
        moment += SCRAPE_S


def fill(folder: Path, text: str) -> Prometheus:
    """A Prometheus that knows the history ``text``."""
    (folder / "history.om").write_text(text)
    made = subprocess.run(
        [
            "promtool", "tsdb", "create-blocks-from", "openmetrics",
            str(folder / "history.om"), str(folder / "data"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return Prometheus(folder, "global: {}\n")
