"""Rows on the machine itself: GPUs as their driver sees them, and the host's memory.

Covers: those of the board of a run, and those of all machines. Does not cover: how a
panel is written (``panels.py``).

The machine's metrics have no run: a run's GPUs are found by ``device``, and its host by
``instance``, which every scrape adds.
"""

from __future__ import annotations

from oomrun.monitoring.panels import Panel, Query, Row, lines, thresholds

__all__ = ["ALL_GPUS", "OF_RUN", "SOURCES"]

_RUN = 'run=~"$run"'
_GPU = f'oomrun_gpu_info{{{_RUN}, device=~"$device"}}'
_IN_USE = f'oomrun_device_memory_in_use_bytes{{{_RUN}, device=~"$device"}}'
_NO_GPU = "no GPU"
_FULL = thresholds((None, "green"), (0.8, "orange"), (0.9, "red"))


def _of_gpus(metric: str) -> str:
    """The metric of the chosen runs' GPUs, each once."""
    return f"max by (device) ({metric} and on (device) {_GPU})"


def _of_hosts(expr: str) -> str:
    """The same of the chosen runs' hosts."""
    return f"({expr}) and on (instance) oomrun_run_state{{{_RUN}}}"


def _of_others(used: str, label: str, source: str) -> Panel:
    """What others have on a run's GPU, where ``used`` is all, by the UUID's label."""
    gpu = f"max by (run, rank, {label}) ({_GPU})"
    return Panel(
        title=f"Memory of other programs ({source})", type="timeseries",
        unit="bytes", width=8,
        description="All that the driver counts on the GPU, less what TensorFlow has "
        "allocated: neighbours, and the CUDA context."
        + ("" if source == "oomrun" else f" Empty without {source}."),
        queries=(
            Query(
                expr=f"sum by (run, rank) (sum by ({label}) ({used}) "
                f"* on ({label}) group_right () {gpu}) "
                f"- on (run, rank) sum by (run, rank) ({_IN_USE})",
                legend="{{run}} rank {{rank}}",
            ),
        ),
        defaults={
            "custom": lines(),
            "noValue": _NO_GPU if source == "oomrun" else f"no GPU, or no {source}",
        },
    )  # fmt: skip


OF_RUN = (
    Row(
        title="GPUs as the driver sees them",
        panels=(
            _of_others("oomrun_gpu_memory_used_bytes", "device", "oomrun"),
            _of_others("DCGM_FI_DEV_FB_USED * 1048576", "UUID", "dcgm-exporter"),
            _of_others("nvidia_smi_memory_used_bytes", "uuid", "nvidia_gpu_exporter"),
        ),
    ),
    Row(
        panels=(
            Panel(
                title="Memory of the GPU", type="timeseries", unit="bytes", width=8,
                description="What the GPU has, and what all processes together hold. "
                "TensorFlow keeps what it once had: this shows its pool, not its need.",
                queries=(
                    Query(
                        expr=_of_gpus("oomrun_gpu_memory_total_bytes"),
                        legend="{{device}} total",
                    ),
                    Query(
                        expr=_of_gpus("oomrun_gpu_memory_used_bytes"),
                        legend="{{device}} used",
                    ),
                ),
                defaults={"min": 0, "custom": lines(), "noValue": _NO_GPU},
            ),
            Panel(
                title="Utilisation", type="timeseries", unit="percentunit", width=8,
                description="Share of the time in which something ran on the GPU. Low "
                "at a small micro-batch: it may have become too small to fill the GPU.",
                queries=(
                    Query(
                        expr=_of_gpus("oomrun_gpu_utilization_ratio"),
                        legend="{{device}}",
                    ),
                ),
                defaults={
                    "min": 0, "max": 1, "custom": lines(), "noValue": _NO_GPU,
                },
            ),
            Panel(
                title="Temperature", type="timeseries", unit="celsius", width=4,
                description="A GPU that is too hot runs slower.",
                queries=(
                    Query(
                        expr=_of_gpus("oomrun_gpu_temperature_celsius"),
                        legend="{{device}}",
                    ),
                ),
                defaults={"custom": lines(), "noValue": _NO_GPU},
            ),
            Panel(
                title="Power", type="timeseries", unit="watt", width=4,
                description="What the GPU draws.",
                queries=(
                    Query(
                        expr=_of_gpus("oomrun_gpu_power_watts"), legend="{{device}}"
                    ),
                ),
                defaults={"min": 0, "custom": lines(), "noValue": _NO_GPU},
            ),
        ),
    ),
    Row(
        title="The host",
        panels=(
            Panel(
                title="Host memory", type="timeseries", unit="percentunit", width=12,
                description="In use of what this machine or container may have, and "
                "the most that its cgroup has used, page cache included. At 100 % the "
                "kernel kills: batches waiting in tf.data are the usual reason.",
                queries=(
                    Query(
                        expr=_of_hosts(
                            "oomrun_host_memory_used_bytes "
                            "/ oomrun_host_memory_limit_bytes"
                        ),
                        legend="{{instance}} used",
                    ),
                    Query(
                        expr=_of_hosts(
                            "oomrun_host_memory_peak_bytes "
                            "/ oomrun_host_memory_limit_bytes"
                        ),
                        legend="{{instance}} peak",
                    ),
                ),
                defaults={
                    "min": 0, "thresholds": _FULL,
                    "custom": {**lines(), "thresholdsStyle": {"mode": "dashed"}},
                },
            ),
            Panel(
                title="Waiting for host memory", type="timeseries", unit="percentunit",
                width=6,
                description="Share of the time in which some, or all, processes waited "
                "for memory. Empty where the kernel does not count it.",
                queries=(
                    Query(
                        expr=_of_hosts(
                            "rate(oomrun_host_memory_pressure_seconds_total"
                            "[$__rate_interval])"
                        ),
                        legend="{{instance}} {{kind}}",
                    ),
                ),
                defaults={"min": 0, "custom": lines(), "noValue": "not counted"},
            ),
            Panel(
                title="Killed by the kernel", type="timeseries", unit="short", width=6,
                description="Processes that the kernel killed for memory, in the "
                "cgroup that oomrun runs in.",
                queries=(
                    Query(
                        expr=_of_hosts(
                            "increase(oomrun_host_oom_kills_total[$__rate_interval])"
                        ),
                        legend="{{instance}}",
                    ),
                ),
                defaults={
                    "min": 0,
                    "custom": {
                        "drawStyle": "bars", "fillOpacity": 80, "lineWidth": 1,
                    },
                },
            ),
        ),
    ),
)  # fmt: skip

_USED = (
    "max by (device) (oomrun_gpu_memory_used_bytes) "
    "/ max by (device) (oomrun_gpu_memory_total_bytes)"
)

ALL_GPUS = Row(
    panels=(
        Panel(
            title="GPUs", type="bargauge", unit="percentunit", width=12,
            description="Memory in use of every GPU of every machine, whether or not "
            "oomrun runs something there.",
            queries=(
                Query(
                    expr=f"({_USED}) * on (device) group_left (model) "
                    "max by (device, model) (oomrun_gpu_hardware_info)",
                    legend="{{model}} {{device}}",
                    instant=True,
                ),
            ),
            defaults={"min": 0, "max": 1, "thresholds": _FULL, "noValue": _NO_GPU},
            options={
                "reduceOptions": {
                    "calcs": ["lastNotNull"], "fields": "", "values": False,
                },
                "orientation": "horizontal", "displayMode": "basic",
            },
        ),
        Panel(
            title="GPUs without a run of oomrun", type="timeseries", unit="short",
            width=12,
            description="How many of the GPUs have no run of oomrun, and how many "
            "there are.",
            queries=(
                Query(
                    expr="count(max by (device) (oomrun_gpu_memory_total_bytes) "
                    "unless on (device) oomrun_gpu_info) or vector(0)",
                    legend="without a run",
                ),
                Query(
                    expr="count(max by (device) (oomrun_gpu_memory_total_bytes)) "
                    "or vector(0)",
                    legend="all",
                ),
            ),
            defaults={"min": 0, "decimals": 0, "custom": lines(stepped=True)},
        ),
    ),
)  # fmt: skip

SOURCES = (
    Panel(
        title="Sources that can be read", type="timeseries", unit="short", width=6,
        description="1 where the last reading worked, 0 where it did not: a driver "
        "that hangs, for one.",
        queries=(
            Query(
                expr="min by (instance, collector) (oomrun_collector_success)",
                legend="{{instance}} {{collector}}",
            ),
        ),
        defaults={"min": 0, "max": 1, "custom": lines(stepped=True)},
    ),
    Panel(
        title="Time to read them", type="timeseries", unit="s", width=6,
        description="How long the last reading of each source took.",
        queries=(
            Query(
                expr="max by (instance, collector) "
                "(oomrun_collector_duration_seconds)",
                legend="{{instance}} {{collector}}",
            ),
        ),
        defaults={"min": 0, "custom": lines()},
    ),
)  # fmt: skip
