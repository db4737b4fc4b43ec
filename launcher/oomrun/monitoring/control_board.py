"""The dashboard "control and throughput": what was changed, and how fast it trains.

Covers: what it shows. Does not cover: how a panel is written (``panels.py``).
"""

from __future__ import annotations

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
_BARS = {"custom": {"drawStyle": "bars", "fillOpacity": 80, "lineWidth": 1}}
_LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}


def _of(metric: str, legend: str = "") -> Query:
    """One series a run."""
    return Query(
        expr=f"max by (run) ({metric}{{{_RUN}}})",
        legend=f"{{{{run}}}} {legend}".strip(),
    )


def _quantile(share: float, metric: str) -> Query:
    return Query(
        expr=f"histogram_quantile({share}, sum by (run, le) "
        f"(rate({metric}_bucket{{{_RUN}}}[$__rate_interval])))",
        legend=f"{{{{run}}}} {share:.0%}",
    )


def _mean(metric: str, *, by: str = "run") -> str:
    def increase(part: str) -> str:
        return f"sum by ({by}) (increase({metric}_{part}{{{_RUN}}}[$__range]))"

    return f"{increase('sum')} / ({increase('count')} > 0)"


_STATE = Panel(
    title="State", type="state-timeline", unit="short", width=24,
    description="What each run was doing. Adapting: memory ran out and a smaller "
    "micro-batch is tried in process. Recovering: a worker is started again.",
    queries=(Query(expr=state_number(_RUN), legend="{{run}}"),),
    defaults={"mappings": STATE_MAPPINGS, "custom": {"fillOpacity": 80}},
    options={"showValue": "auto", "mergeValues": True},
)  # fmt: skip

_BATCH = (
    Panel(
        title="Micro-batch, accumulation, replicas", type="timeseries", unit="short",
        width=12,
        description="How the global batch is cut up: samples in one pass, passes to "
        "an optimizer step, and copies of the model.",
        queries=(
            _of("oomrun_micro_batch_size", "micro-batch"),
            _of("oomrun_gradient_accumulation_steps", "accumulation steps"),
            _of("oomrun_replicas", "replicas"),
        ),
        defaults={"min": 0, "custom": lines(stepped=True, fill=0)},
    ),
    Panel(
        title="Global batch", type="timeseries", unit="short", width=6,
        description="Samples to an optimizer step. Recovery never changes it: where "
        "this line moves, the script itself asked for another batch.",
        queries=(_of("oomrun_global_batch_size"),),
        defaults={"min": 0, "custom": lines(stepped=True)},
    ),
    Panel(
        title="Settings changed", type="timeseries", unit="short", width=6,
        description="What was changed, in which direction, and why.",
        queries=(
            Query(
                expr="sum by (run, action, direction, trigger) (increase("
                f"oomrun_adaptations_total{{{_RUN}}}[$__rate_interval])) > 0",
                legend="{{run}} {{action}} {{direction}} by {{trigger}}",
            ),
        ),
        defaults=_BARS,
    ),
)  # fmt: skip

_PACE = (
    Panel(
        title="Throughput", type="timeseries", unit="short", width=8,
        description="Samples trained on in a second, those trained on again after a "
        "restart included.",
        queries=(
            Query(
                expr="sum by (run) (rate("
                f"oomrun_samples_total{{{_RUN}}}[$__rate_interval]))",
                legend="{{run}}",
            ),
        ),
        defaults={"min": 0, "custom": lines()},
    ),
    Panel(
        title="Step time", type="timeseries", unit="s", width=8,
        description="Median and 95 % quantile of an optimizer step, from the means of "
        "windows of a few steps each.",
        queries=(
            _quantile(0.5, "oomrun_step_duration_seconds"),
            _quantile(0.95, "oomrun_step_duration_seconds"),
        ),
        defaults={"min": 0, "custom": lines(fill=0)},
    ),
    Panel(
        title="Step time, all steps", type="heatmap", unit="s", width=8,
        description="How many steps took how long. Two bands at once: some steps are "
        "slower than others, as where each shape is compiled anew.",
        queries=(
            Query(
                expr="sum by (le) (increase("
                f"oomrun_step_duration_seconds_bucket{{{_RUN}}}[$__rate_interval]))",
                legend="{{le}}",
                form="heatmap",
            ),
        ),
        options={
            "calculate": False, "yAxis": {"unit": "s"},
            "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64},
        },
    ),
)  # fmt: skip

_PROGRESS = (
    Panel(
        title="Loss", type="timeseries", unit="short", width=8,
        description="The last training loss. It must not jump where a setting was "
        "changed: the optimizer step stays the same.",
        queries=(_of("oomrun_loss"),),
        defaults={"custom": lines(fill=0)},
    ),
    Panel(
        title="Steps and lost steps", type="timeseries", unit="short", width=8,
        description="Where the run is; the line falls where steps were lost. Bars: "
        "steps that had to be trained again, by reason.",
        queries=(
            _of("oomrun_step", "step"),
            Query(
                expr="sum by (run, reason) (increase("
                f"oomrun_lost_steps_total{{{_RUN}}}[$__rate_interval])) > 0",
                legend="{{run}} lost by {{reason}}",
            ),
        ),
        defaults={"min": 0, "custom": lines(stepped=True, fill=0)},
        overrides=(
            {
                "matcher": {"id": "byRegexp", "options": "/ lost by /"},
                "properties": [
                    {"id": "custom.drawStyle", "value": "bars"},
                    {"id": "custom.fillOpacity", "value": 80},
                ],
            },
        ),
    ),
    Panel(
        title="Steps a second", type="timeseries", unit="short", width=8,
        description="Optimizer steps in a second. 0 while the state is training: see "
        "the alert OomrunStalled.",
        queries=(
            Query(
                expr="sum by (run) (rate("
                f"oomrun_steps_total{{{_RUN}}}[$__rate_interval]))",
                legend="{{run}}",
            ),
        ),
        defaults={"min": 0, "custom": lines()},
    ),
)  # fmt: skip

_RECOVERY = (
    Panel(
        title="Restarts and resumes", type="timeseries", unit="short", width=8,
        description="Restarts by what made them necessary, and how often a new "
        "supervisor took the unfinished run over.",
        queries=(
            Query(
                expr="sum by (run, reason) (increase("
                f"oomrun_restarts_total{{{_RUN}}}[$__rate_interval])) > 0",
                legend="{{run}} by {{reason}}",
            ),
            Query(
                expr="sum by (run) (increase("
                f"oomrun_resumes_total{{{_RUN}}}[$__rate_interval])) > 0",
                legend="{{run}} resumed",
            ),
        ),
        defaults=_BARS,
    ),
    Panel(
        title="Mean recovery time", type="stat", unit="s", width=8,
        description="From what stopped training to the first progress after it, by "
        "reason, over the time shown.",
        queries=(
            Query(
                expr=_mean("oomrun_recovery_duration_seconds", by="run, reason"),
                legend="{{run}} {{reason}}",
            ),
        ),
        options=_LAST,
    ),
    Panel(
        title="Workers alive", type="timeseries", unit="short", width=4,
        description="Worker processes that are there, and that should be.",
        queries=(
            _of("oomrun_workers_alive", "alive"),
            _of("oomrun_workers_expected", "expected"),
        ),
        defaults={"min": 0, "decimals": 0, "custom": lines(stepped=True)},
    ),
    Panel(
        title="Last word of a worker", type="stat", unit="s", width=4,
        description="How long ago a worker last reported anything. A step that is "
        "compiled, or a long evaluation, is silent too.",
        queries=(
            Query(
                expr="time() - max by (run, rank) "
                f"(oomrun_worker_last_heartbeat_timestamp_seconds{{{_RUN}}})",
                instant=True,
                legend="{{run}} rank {{rank}}",
            ),
        ),
        defaults={
            "thresholds": thresholds((None, "green"), (120, "orange"), (600, "red"))
        },
        options=_LAST,
    ),
)  # fmt: skip

_CHECKPOINTS = (
    Panel(
        title="Age of the newest checkpoint", type="stat", unit="s", width=6,
        description="What is lost if the process dies now; of the copy at "
        "checkpoint.dir, where that is a URL: if the machine does.",
        queries=(
            Query(
                expr="time() - max by (run) "
                f"(oomrun_checkpoint_last_success_timestamp_seconds{{{_RUN}}})",
                instant=True,
                legend="{{run}}",
            ),
            Query(
                expr="time() - max by (run) "
                "(oomrun_checkpoint_mirror_last_success_timestamp_seconds"
                f"{{{_RUN}}})",
                instant=True,
                legend="{{run}}, copy",
            ),
        ),
        defaults={
            "thresholds": thresholds((None, "green"), (1800, "orange"), (3600, "red"))
        },
        options=_LAST,
    ),
    Panel(
        title="Size of the newest checkpoint", type="stat", unit="bytes", width=6,
        description="Times checkpoint.keep, this is the room that is needed on disk.",
        queries=(_of("oomrun_checkpoint_size_bytes"),),
        options=_LAST,
    ),
    Panel(
        title="Mean time to write a checkpoint", type="stat", unit="s", width=6,
        description="Over the time shown. `--grace` must be longer than this.",
        queries=(
            Query(expr=_mean("oomrun_checkpoint_duration_seconds"), legend="{{run}}"),
        ),
        options=_LAST,
    ),
    Panel(
        title="Checkpoints that failed", type="stat", unit="short", width=6,
        description="Checkpoints that could not be written in the time shown; the run "
        "goes on. Usually the disk is full.",
        queries=(
            Query(
                expr="round(sum by (run) (increase("
                f"oomrun_checkpoint_failures_total{{{_RUN}}}[$__range])))",
                legend="{{run}}",
            ),
            Query(
                expr="round(sum by (run) (increase("
                f"oomrun_checkpoint_mirror_failures_total{{{_RUN}}}[$__range])))",
                legend="{{run}}, copies",
            ),
        ),
        defaults={"thresholds": thresholds((None, "green"), (1, "red"))},
        options=_LAST,
    ),
)  # fmt: skip

BOARD = Board(
    uid="oomrun-control",
    title="oomrun / control and throughput",
    description="What oomrun did to keep runs going, and what it cost them.",
    variables={"run": "label_values(oomrun_run_state, run)"},
    rows=(
        Row(panels=(_STATE,), height=6),
        Row(panels=_BATCH),
        Row(panels=_PACE),
        Row(panels=_PROGRESS),
        Row(panels=_RECOVERY, title="Recovery", height=7),
        Row(panels=_CHECKPOINTS, title="Checkpoints", height=5),
    ),
)
