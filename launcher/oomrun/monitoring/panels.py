"""Grafana's classic dashboard model, built from short descriptions.

Covers: panels, rows, variables, where each panel stands. Does not cover: what the
boards show (``memory_board.py``, ``control_board.py``, ``fleet_board.py``).

Grafana gives a field that is missing a default of its own, so only what differs is
written.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oomrun.metrics.run_families import RUN_STATES

__all__ = [
    "DATASOURCE", "STATE_MAPPINGS", "Board", "Panel", "Query", "Row", "lines",
    "state_number", "thresholds",
]  # fmt: skip

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_SCHEMA_VERSION = 39  # of Grafana 10.4; newer ones migrate it when they load it
_STATE_COLOURS = {
    "pending": "text", "starting": "blue", "training": "green",
    "evaluating": "super-light-green", "checkpointing": "light-blue",
    "adapting": "yellow", "recovering": "orange", "completed": "dark-green",
    "failed": "red", "preempted": "purple",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel.

    Attributes:
        legend: the name of each series, with ``{{label}}`` for a label's value.
        form: time_series, table, or heatmap.
    """

    expr: str
    legend: str = ""
    form: str = "time_series"
    instant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; ``Board`` gives it its place and its id.

    Attributes:
        type: of Grafana's panels, as ``timeseries``.
        unit: of Grafana's units, as ``bytes``, which counts in KiB.
        description: what is seen, and what it means.
        width: of the 24 columns that a board has.
        options, defaults, overrides, transformations: as the panel's type has them.
    """

    title: str
    type: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    width: int
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Mapping[str, Any]] = ()
    transformations: Sequence[Mapping[str, Any]] = ()

    def to_json(self, identity: int, x: int, y: int, height: int) -> dict[str, Any]:
        """The panel as Grafana has it."""
        body = {
            "id": identity,
            "type": self.type,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": height},
            "targets": [
                _target(query, letter)
                for query, letter in zip(
                    self.queries, string.ascii_uppercase, strict=False
                )
            ],
            "fieldConfig": {
                "defaults": {"unit": self.unit, **self.defaults},
                "overrides": list(self.overrides),
            },
            "options": dict(self.options),
        }
        if self.transformations:
            body["transformations"] = list(self.transformations)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels side by side; with a title, under a heading of their own."""

    panels: tuple[Panel, ...]
    height: int = 8
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard.

    Attributes:
        uid: by which links find it; never changes.
        variables: label to the query of its values.
    """

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The board as Grafana has it."""
        return {
            "id": None,
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["oomrun"],
            "schemaVersion": _SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,  # one crosshair over all panels
            "refresh": "30s",
            "timezone": "browser",
            "time": {"from": "now-3h", "to": "now"},
            "links": [_links_to_the_others()],
            "annotations": {"list": _annotations("run" in self.variables)},
            "templating": {"list": [_datasource(), *self._variables()]},
            "panels": self._panels(),
        }

    def _variables(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "query",
                "name": name,
                "label": name,
                "datasource": DATASOURCE,
                "definition": query,
                "query": {"query": query, "refId": f"values-of-{name}"},
                "refresh": 2,  # with the time range: runs come and go
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
            for name, query in self.variables.items()
        ]

    def _panels(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            if row.title:
                found.append(_heading(row.title, len(found) + 1, y))
                y += 1
            x = 0
            for panel in row.panels:
                if x + panel.width > _COLUMNS:
                    raise ValueError(f"{self.uid}: {panel.title} is too wide")
                found.append(panel.to_json(len(found) + 1, x, y, row.height))
                x += panel.width
            y += row.height
        return found


def lines(*, stepped: bool = False, fill: int = 8) -> dict[str, Any]:
    """The ``custom`` part of a time series: lines, or steps for what jumps."""
    return {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter" if stepped else "linear",
        "lineWidth": 2,
        "fillOpacity": fill,
        "showPoints": "never",
    }


def thresholds(*steps: tuple[float | None, str]) -> dict[str, Any]:
    """Colours by value, each from its value on."""
    made = [{"value": value, "color": colour} for value, colour in steps]
    return {"mode": "absolute", "steps": made}


def state_number(selector: str, window: str = "") -> str:
    """A query for the place of each run's state in ``RUN_STATES``, one series a run.

    Args:
        selector: label matchers.
        window: with one, the last state in it counts, also of a run that has ended.
    """
    parts = []
    for number, name in enumerate(RUN_STATES):
        series = f'oomrun_run_state{{{selector}, oomrun_run_state="{name}"}}'
        if window:
            series = f"last_over_time({series}[{window}])"
        parts.append(f"(max by (run) ({series} == 1) * 0 + {number})")
    return " or ".join(parts)


#: Turns such a number back into the state's name and colour.
STATE_MAPPINGS = [
    {
        "type": "value",
        "options": {
            str(number): {"text": name, "color": _STATE_COLOURS[name], "index": number}
            for number, name in enumerate(RUN_STATES)
        },
    }
]


def _target(query: Query, letter: str) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": query.form,
        "instant": query.instant,
        "range": not query.instant,
    }


def _heading(title: str, identity: int, y: int) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        "panels": [],
    }


def _datasource() -> dict[str, Any]:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "data source",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
    }


def _links_to_the_others() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "oomrun",
        "tags": ["oomrun"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
    }


def _annotations(by_run: bool) -> list[dict[str, Any]]:
    """Marks on every panel where memory ran out and where settings were changed."""
    runs = 'run=~"$run"' if by_run else 'run=~".+"'
    marks = (
        (
            "ran out of memory", "red", "{{kind}} memory ran out in {{phase}}",
            f"sum by (run, kind, phase) (increase(oomrun_oom_events_total{{{runs}}}"
            "[$__rate_interval])) > 0",
        ),
        (
            "settings changed", "yellow", "{{action}} {{direction}} by {{trigger}}",
            "sum by (run, action, direction, trigger) (increase("
            f"oomrun_adaptations_total{{{runs}}}[$__rate_interval])) > 0",
        ),
    )  # fmt: skip
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": colour,
            "expr": expr,
            "titleFormat": "{{run}}",
            "textFormat": text,
        }
        for name, colour, text, expr in marks
    ]
