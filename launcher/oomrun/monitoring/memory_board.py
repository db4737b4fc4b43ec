"""The dashboard "memory headroom": how much is left on each device, and for how long.

Covers: what it shows. Does not cover: how a panel is written (``panels.py``).
"""

from __future__ import annotations

from oomrun.monitoring.machine_rows import OF_RUN
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

_RUN = 'run=~"$run"'
_DEVICE = 'run=~"$run", device=~"$device"'
_EACH = "{{run}} {{device}}"
_HEADROOM = f"oomrun_device_memory_headroom_bytes{{{_DEVICE}}}"
_LIMIT = f"oomrun_device_memory_limit_bytes{{{_DEVICE}}}"
_PEAK = f"oomrun_device_memory_peak_bytes{{{_DEVICE}}}"
_IN_USE = f"oomrun_device_memory_in_use_bytes{{{_DEVICE}}}"
_PREDICTED = f"oomrun_device_memory_predicted_peak_bytes{{{_DEVICE}}}"
_TIGHT = thresholds((None, "red"), (0.05, "orange"), (0.1, "green"))
_ANY_IS_BAD = thresholds((None, "green"), (1, "orange"), (3, "red"))
_LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}


def _dashed(legend: str, colour: str) -> dict[str, object]:
    """Draws the lines whose legend ends so as dashes: bounds, not measurements."""
    return {
        "matcher": {"id": "byRegexp", "options": f"/{legend}$/"},
        "properties": [
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}},
        ],
    }


_NOW = Row(
    height=5,
    panels=(
        Panel(
            title="Run state", type="stat", unit="short", width=4,
            description="The state that each run is in, or was in when it ended.",
            queries=(
                Query(expr=state_number(_RUN, "$__range"), legend="{{run}}"),
            ),
            defaults={"mappings": STATE_MAPPINGS},
            options={**_LAST, "colorMode": "background", "graphMode": "none"},
        ),
        Panel(
            title="Lowest headroom", type="stat", unit="bytes", width=4,
            description="The limit less the highest peak at the current micro-batch, "
            "of the device where it is least.",
            queries=(
                Query(expr=f"min by (run) ({_HEADROOM})", legend="{{run}}"),
            ),
            options={**_LAST, "graphMode": "area"},
        ),
        Panel(
            title="Lowest headroom, share", type="gauge", unit="percentunit", width=4,
            description="The same as a share of the limit. oomrun plans to keep 8 % "
            "(memory.headroom); below 5 % the next larger batch may not fit.",
            queries=(
                Query(
                    expr=f"min by (run) ({_HEADROOM} / {_LIMIT})", legend="{{run}}"
                ),
            ),
            defaults={"min": 0, "max": 1, "thresholds": _TIGHT},
            options=_LAST,
        ),
        Panel(
            title="Time to exhaustion", type="stat", unit="s", width=4,
            description="When the headroom is used up if it goes on shrinking as in "
            "the last 30 minutes. Empty while it does not shrink.",
            queries=(
                Query(
                    expr=f"min by (run) ({_HEADROOM} / (-deriv({_HEADROOM}[30m]) > 0))",
                    instant=True, legend="{{run}}",
                ),
            ),
            defaults={
                "noValue": "not shrinking",
                "thresholds": thresholds(
                    (None, "red"), (3600, "orange"), (6 * 3600, "green")
                ),
            },
            options=_LAST,
        ),
        Panel(
            title="Ran out of memory", type="stat", unit="short", width=4,
            description="How often memory ran out in the time shown, recovered or not.",
            queries=(
                Query(
                    expr="round(sum by (run) (increase("
                    f"oomrun_oom_events_total{{{_RUN}}}[$__range])))",
                    legend="{{run}}",
                ),
            ),
            defaults={"thresholds": _ANY_IS_BAD, "decimals": 0},
            options=_LAST,
        ),
        Panel(
            title="Settings changed", type="stat", unit="short", width=4,
            description="How often a setting was changed in the time shown, because "
            "memory ran out or because it came back.",
            queries=(
                Query(
                    expr="round(sum by (run) (increase("
                    f"oomrun_adaptations_total{{{_RUN}}}[$__range])))",
                    legend="{{run}}",
                ),
            ),
            defaults={"decimals": 0},
            options=_LAST,
        ),
    ),
)  # fmt: skip

_ANATOMY = Panel(
    title="Memory of each device", type="timeseries", unit="bytes", width=24,
    description="In use at the last report, and the highest peak at the current "
    "micro-batch. Dashed: the limit, what is planned into (the budget), and the peak "
    "that was predicted, with the upper end of its interval.",
    queries=(
        Query(expr=_LIMIT, legend=f"{_EACH} limit"),
        Query(
            expr=f"oomrun_device_memory_budget_bytes{{{_DEVICE}}}",
            legend=f"{_EACH} budget",
        ),
        Query(
            expr=f"oomrun_device_memory_predicted_peak_high_bytes{{{_DEVICE}}}",
            legend=f"{_EACH} predicted at most",
        ),
        Query(expr=_PREDICTED, legend=f"{_EACH} predicted"),
        Query(expr=_PEAK, legend=f"{_EACH} peak"),
        Query(expr=_IN_USE, legend=f"{_EACH} in use"),
    ),
    defaults={"min": 0, "custom": lines(stepped=True)},
    overrides=(
        _dashed("limit", "red"),
        _dashed("budget", "orange"),
        _dashed("predicted at most", "light-purple"),
        _dashed("predicted", "purple"),
    ),
)  # fmt: skip

_TRENDS = (
    Panel(
        title="Headroom of each device", type="timeseries", unit="percentunit",
        width=12,
        description="The share of the limit above the peak. It jumps up when the "
        "micro-batch shrinks; where it only falls, memory leaks.",
        queries=(Query(expr=f"{_HEADROOM} / {_LIMIT}", legend=_EACH),),
        defaults={
            "min": 0, "max": 1, "thresholds": _TIGHT,
            "custom": {**lines(), "thresholdsStyle": {"mode": "dashed"}},
        },
    ),
    Panel(
        title="Headroom in one hour", type="timeseries", unit="bytes", width=12,
        description="The headroom's line of the last 30 minutes drawn on by one hour. "
        "Below 0, memory runs out within the hour.",
        queries=(
            Query(expr=f"predict_linear({_HEADROOM}[30m], 3600)", legend=_EACH),
        ),
        defaults={
            "thresholds": thresholds((None, "red"), (0, "green")),
            "custom": {**lines(), "thresholdsStyle": {"mode": "line"}},
        },
    ),
)  # fmt: skip

_PREDICTION = (
    Panel(
        title="Error of the prediction", type="timeseries", unit="percentunit",
        width=12,
        description="Peak less predicted peak, as a share of the predicted one. Above "
        "0 more was used than predicted. Empty where nothing was predicted.",
        queries=(
            Query(expr=f"({_PEAK} - {_PREDICTED}) / {_PREDICTED}", legend=_EACH),
        ),
        defaults={"custom": lines(stepped=True)},
    ),
    Panel(
        title="Where memory ran out", type="timeseries", unit="short", width=12,
        description="Exhaustions by device and phase of the step: gradients and apply "
        "are training, host is the machine's own memory.",
        queries=(
            Query(
                expr="sum by (run, device, phase) (increase("
                f"oomrun_oom_events_total{{{_RUN}}}[$__rate_interval])) > 0",
                legend="{{run}} {{device}} in {{phase}}",
            ),
        ),
        defaults={
            "custom": {"drawStyle": "bars", "fillOpacity": 80, "lineWidth": 1}
        },
    ),
)  # fmt: skip


BOARD = Board(
    uid="oomrun-memory",
    title="oomrun / memory headroom",
    description="How much memory is left on each device, whether the prediction held, "
    "and when memory ran out.",
    variables={
        "run": "label_values(oomrun_run_state, run)",
        "device": f"label_values(oomrun_device_memory_limit_bytes{{{_RUN}}}, device)",
    },
    rows=(
        _NOW,
        Row(panels=(_ANATOMY,), height=10),
        Row(panels=_TRENDS),
        Row(panels=_PREDICTION),
        *OF_RUN,
    ),
)
