"""The dashboard "fleet": all runs at a glance, with a way to each one's own boards.

Covers: what it shows. Does not cover: how a panel is written (``panels.py``).
"""

from __future__ import annotations

import string
from typing import Any

from oomrun.monitoring.machine_rows import ALL_GPUS, SOURCES
from oomrun.monitoring.panels import (
    STATE_MAPPINGS,
    Board,
    Panel,
    Query,
    Row,
    lines,
    state_number,
    thresholds,
)

__all__ = ["BOARD"]

_LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
#: The table's columns: title, unit, query. The last one brings labels, no values.
_COLUMNS = (
    ("state", "short", state_number('run=~".+"', "$__range")),
    (
        "lowest headroom", "percentunit",
        "min by (run) (min_over_time(oomrun_device_memory_headroom_bytes[$__range]) "
        "/ last_over_time(oomrun_device_memory_limit_bytes[$__range]))",
    ),
    (
        "ran out of memory", "short",
        "round(sum by (run) (increase(oomrun_oom_events_total[$__range])))",
    ),
    (
        "restarts", "short",
        "round(sum by (run) (increase(oomrun_restarts_total[$__range])))",
    ),
    (
        "micro-batch", "short",
        "max by (run) (last_over_time(oomrun_micro_batch_size[$__range]))",
    ),
    (
        "epoch", "short", "max by (run) (last_over_time(oomrun_epoch[$__range]))",
    ),
    ("of", "short", "max by (run) (last_over_time(oomrun_epochs[$__range]))"),
    ("loss", "short", "max by (run) (last_over_time(oomrun_loss[$__range]))"),
    ("samples/s", "short", "sum by (run) (rate(oomrun_samples_total[5m]))"),
    (
        "started", "dateTimeFromNow",
        "min by (run) (last_over_time(oomrun_run_start_timestamp_seconds[$__range])) "
        "* 1000",
    ),
    (
        "ended", "dateTimeFromNow",
        "max by (run) (last_over_time(oomrun_run_end_timestamp_seconds[$__range])) "
        "* 1000",
    ),
    (
        "TensorFlow", "string",
        "max by (run, framework_version, keras_version, strategy) "
        "(last_over_time(oomrun_run_info[$__range]))",
    ),
)  # fmt: skip


def _value(number: int) -> str:
    """What Grafana calls the values of the table's query ``number``."""
    return f"Value #{string.ascii_uppercase[number]}"


def _column(number: int, title: str, unit: str) -> dict[str, Any]:
    """The column's title, unit and colours."""
    properties: list[dict[str, Any]] = [
        {"id": "displayName", "value": title}, {"id": "unit", "value": unit},
    ]  # fmt: skip
    coloured = {"id": "custom.cellOptions", "value": {"type": "color-text"}}
    if title == "state":
        properties += [{"id": "mappings", "value": STATE_MAPPINGS}, coloured]
    elif title == "lowest headroom":
        steps = thresholds((None, "red"), (0.05, "orange"), (0.1, "green"))
        properties += [{"id": "thresholds", "value": steps}, coloured]
    return {
        "matcher": {"id": "byName", "options": _value(number)},
        "properties": properties,
    }


def _to(uid: str, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "url": f"/d/{uid}?var-run=${{__data.fields.run}}&${{__url_time_range}}",
    }


_TABLE = Panel(
    title="Runs", type="table", unit="short", width=24,
    description="All runs in the time shown, those that have ended too. A click on a "
    "name leads to its own boards.",
    queries=tuple(
        Query(expr=expr, form="table", instant=True) for _, _, expr in _COLUMNS
    ),
    options={"showHeader": True, "cellHeight": "sm"},
    overrides=(
        {
            "matcher": {"id": "byName", "options": "run"},
            "properties": [
                {
                    "id": "links",
                    "value": [
                        _to("oomrun-memory", "memory headroom"),
                        _to("oomrun-control", "control and throughput"),
                    ],
                }
            ],
        },
        *(
            _column(number, title, unit)
            for number, (title, unit, _) in enumerate(_COLUMNS[:-1])
        ),
    ),
    transformations=(
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True, _value(len(_COLUMNS) - 1): True},
                "renameByName": {
                    "framework_version": "TensorFlow", "keras_version": "Keras",
                },
            },
        },
    ),
)  # fmt: skip

_COUNTS = (
    Panel(
        title="Runs by state", type="bargauge", unit="short", width=8,
        description="How many runs are in each state at this moment.",
        queries=(
            Query(
                expr="sum by (oomrun_run_state) "
                "(max by (run, oomrun_run_state) (oomrun_run_state)) > 0",
                legend="{{oomrun_run_state}}",
                instant=True,
            ),
        ),
        defaults={"min": 0, "decimals": 0},
        options={**_LAST, "orientation": "horizontal", "displayMode": "basic"},
    ),
    Panel(
        title="Memory limits, and the peaks under them", type="timeseries",
        unit="bytes", width=8,
        description="Summed over all devices that run something: what oomrun may use, "
        "and the highest that it did use. The gap is free for larger jobs.",
        queries=(
            Query(
                expr="sum by (device_kind) (oomrun_device_memory_limit_bytes)",
                legend="{{device_kind}} limit",
            ),
            Query(
                expr="sum by (device_kind) (oomrun_device_memory_peak_bytes)",
                legend="{{device_kind}} peak",
            ),
        ),
        defaults={"min": 0, "custom": lines(stepped=True)},
    ),
    Panel(
        title="Exhaustions and restarts", type="timeseries", unit="short", width=8,
        description="Over all runs. Many at once: look for what they share.",
        queries=(
            Query(
                expr="sum(increase(oomrun_oom_events_total[$__rate_interval]))",
                legend="ran out of memory",
            ),
            Query(
                expr="sum(increase(oomrun_restarts_total[$__rate_interval]))",
                legend="restarts",
            ),
        ),
        defaults={
            "custom": {"drawStyle": "bars", "fillOpacity": 80, "lineWidth": 1}
        },
    ),
)  # fmt: skip

_VERSIONS = Panel(
    title="Versions of oomrun", type="bargauge", unit="short", width=12,
    description="How many exporters run each version.",
    queries=(
        Query(
            expr="count by (version, python) (oomrun_build_info)",
            legend="oomrun {{version}}, Python {{python}}",
            instant=True,
        ),
    ),
    defaults={"min": 0, "decimals": 0},
    options={**_LAST, "orientation": "horizontal", "displayMode": "basic"},
)  # fmt: skip

BOARD = Board(
    uid="oomrun-fleet",
    title="oomrun / fleet",
    description="All runs that this data source knows.",
    rows=(
        Row(panels=(_TABLE,), height=10),
        Row(panels=_COUNTS),
        ALL_GPUS,
        Row(panels=(_VERSIONS, *SOURCES), height=5),
    ),
)
