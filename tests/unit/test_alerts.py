"""The alert rules in Prometheus's own test tool: each fires, and each keeps silent."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomrun.monitoring import export
from oomrun.monitoring.alerts import ALERTS, RECORDED

pytestmark = pytest.mark.skipif(
    not shutil.which("promtool"),
    reason="promtool is not installed (apt-get install prometheus)",
)

BY_NAME = {alert.name: alert for alert in ALERTS}
DEVICE = 'run="r", rank="0", device="cpu:0", device_kind="cpu"'
LIMIT = f"oomrun_device_memory_limit_bytes{{{DEVICE}}}"
HEADROOM = f"oomrun_device_memory_headroom_bytes{{{DEVICE}}}"
IN_USE = f"oomrun_device_memory_in_use_bytes{{{DEVICE}}}"
STEPS = 'oomrun_steps_total{run="r"}'
STEP = 'oomrun_step{run="r"}'
SAVED = 'oomrun_checkpoint_last_success_timestamp_seconds{run="r"}'
STARTED = 'oomrun_run_start_timestamp_seconds{run="r"}'
FAILED = 'oomrun_checkpoint_failures_total{run="r"}'
ALIVE = 'oomrun_workers_alive{run="r"}'
EXPECTED = 'oomrun_workers_expected{run="r"}'


HOST_USED = 'oomrun_host_memory_used_bytes{instance="h"}'
HOST_LIMIT = 'oomrun_host_memory_limit_bytes{instance="h"}'


def reads(collector: str) -> str:
    return f'oomrun_collector_success{{instance="h", collector="{collector}"}}'


def state(name: str) -> str:
    return f'oomrun_run_state{{run="r", oomrun_run_state="{name}"}}'


def ooms(device: str = "cpu:0", kind: str = "device") -> str:
    return (
        f'oomrun_oom_events_total{{run="r", rank="0", device="{device}", '
        f'kind="{kind}", phase="gradients"}}'
    )


def changes(direction: str, trigger: str) -> str:
    return (
        'oomrun_adaptations_total{run="r", action="evaluation_batch", '
        f'direction="{direction}", trigger="{trigger}"}}'
    )


def restarts(reason: str) -> str:
    return f'oomrun_restarts_total{{run="r", reason="{reason}"}}'


@dataclass(frozen=True)
class Case:
    """Series, one value a minute, that make the alert fire, and such as do not."""

    firing: Mapping[str, str]
    at: str
    labels: Mapping[str, str]
    summary: str
    silent: tuple[Mapping[str, str], ...]


RUN = {"run": "r"}
TRAINED = {STARTED: "0x90", state("training"): "1x90", STEP: "1x90"}
CASES = {
    "OomrunHeadroomLow": Case(
        {HEADROOM: "3x20", LIMIT: "100x20"}, "10m", {**RUN, "device": "cpu:0"},
        "r: 3% of the memory limit of cpu:0 is left",
        ({HEADROOM: "6x20", LIMIT: "100x20"}, {HEADROOM: "3x4 40x20", LIMIT: "100x20"}),
    ),
    "OomrunMemoryExhaustionPredicted": Case(
        {HEADROOM: "70-1x60", IN_USE: "30+1x60", LIMIT: "300x60"}, "50m",
        {"run": "r", "rank": "0", "device": "cpu:0", "device_kind": "cpu"},
        "r: memory of cpu:0 runs out within the hour at the present rate",
        (
            {HEADROOM: "70x60", IN_USE: "30x60", LIMIT: "300x60"},
            {HEADROOM: "290-1x60", IN_USE: "10+1x60", LIMIT: "300x60"},
            # One larger peak, and nothing that grows.
            {HEADROOM: "70x30 20x30", IN_USE: "30x60", LIMIT: "300x60"},
        ),
    ),
    "OomrunOutOfMemory": Case(
        {ooms(): "0x10 1x10"}, "12m", {**RUN, "kind": "device"},
        "r: device memory ran out",
        ({ooms(): "0x20"}, {ooms(): "5x20"}),
    ),
    "OomrunRepeatedOutOfMemory": Case(
        {ooms(): "0x10 1 2 3x10", ooms("host", "host"): "0x30"}, "15m", RUN,
        "r: memory ran out three times or more in 30 minutes",
        ({ooms(): "0x10 1 2x10"}, {ooms(): "3x30"}),
    ),
    "OomrunAdaptationFlapping": Case(
        {
            changes("shrink", "oom"): "0x9 1x4 2x4 3x9",
            changes("grow", "headroom"): "0x9 1x4 2x4 3x9",
        },
        "25m", {**RUN, "action": "evaluation_batch"},
        "r: evaluation_batch goes up and down",
        (
            {
                changes("shrink", "oom"): "0x9 1x4 2x4 3x9",
                changes("grow", "headroom"): "0x9 1x20",
            },
        ),
    ),
    "OomrunRecoveryStuck": Case(
        {state("recovering"): "1x10 0x20", state("starting"): "0x10 1x20"}, "20m", RUN,
        "r has been starting or recovering for 15 minutes",
        (
            {state("recovering"): "1x5 0x20", state("training"): "0x5 1x20"},
            {state("starting"): "0x30", state("training"): "1x30"},
        ),
    ),
    "OomrunStalled": Case(
        {STEPS: "0+60x10 600x30", state("training"): "1x40"}, "35m", RUN,
        "r is training, but has taken no step for 20 minutes",
        (
            {STEPS: "0+1x40", state("training"): "1x40"},
            {STEPS: "600x40", state("training"): "0x40"},
        ),
    ),
    "OomrunCheckpointStale": Case(
        {**TRAINED, SAVED: "0x90"}, "80m", RUN,
        "r: the last checkpoint is 1h 20m 0s old",
        (
            {**TRAINED, SAVED: "0+60x90"},
            {**TRAINED, SAVED: "0x90", state("training"): "0x90"},
            # A command's checkpoints are its own affair.
            {STARTED: "0x90", state("training"): "1x90"},
        ),
    ),
    "OomrunCheckpointFailing": Case(
        {FAILED: "0x5 1x10"}, "8m", RUN, "r: a checkpoint could not be written",
        ({FAILED: "0x15"}, {FAILED: "2x15"}),
    ),
    "OomrunRestartLoop": Case(
        {restarts("crash"): "0x5 1x5 2x5 3x9", restarts("oom"): "0x30"}, "22m",
        {**RUN, "reason": "crash"},
        "r was restarted three times or more in an hour (crash)",
        ({restarts("crash"): "0x5 1x20", restarts("oom"): "0x5 1 2x20"},),
    ),
    "OomrunWorkerMissing": Case(
        {ALIVE: "0x20", EXPECTED: "1x20"}, "10m", RUN,
        "r: a worker has been missing for 5 minutes",
        (
            {ALIVE: "1x20", EXPECTED: "1x20"},
            {ALIVE: "0x20", EXPECTED: "0x20"},
            {ALIVE: "0x3 1x20", EXPECTED: "1x24"},
        ),
    ),
    "OomrunRunFailed": Case(
        {state("failed"): "0x5 1 1 _x20"}, "15m", RUN, "r has failed",
        ({state("failed"): "0x20", state("completed"): "1x20"},),
    ),
    "OomrunRunVanished": Case(
        {state("training"): "1x10 stale _x20", state("failed"): "0x10 stale _x20"},
        "20m", RUN, "r was running, and its metrics are gone without an end",
        (
            {state("training"): "1x30"},
            {
                state("training"): "1x9 0 stale _x20",
                state("completed"): "0x9 1 stale _x20",
            },
        ),
    ),
    "OomrunHostMemoryHigh": Case(
        {HOST_USED: "95x20", HOST_LIMIT: "100x20"}, "10m", {"instance": "h"},
        "h: 95% of the host's memory is in use",
        (
            {HOST_USED: "85x20", HOST_LIMIT: "100x20"},
            {HOST_USED: "95x3 50x20", HOST_LIMIT: "100x25"},
        ),
    ),
    "OomrunCollectorFailing": Case(
        {reads("nvml"): "0x20", reads("host"): "1x20"}, "15m",
        {"instance": "h", "collector": "nvml"}, "h: nvml cannot be read",
        ({reads("nvml"): "1x20"}, {reads("nvml"): "0x5 1x20"}, {reads("host"): "1x20"}),
    ),
}  # fmt: skip


def test_every_alert_has_its_cases() -> None:
    assert set(CASES) == set(BY_NAME)


def the_test(name: str, series: Mapping[str, str], at: str, **expected: Any) -> Any:
    return {
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, **expected}],
    }


def run_promtool(folder: Path, tests: list[Any]) -> subprocess.CompletedProcess[str]:
    rules = export.files("json")["oomrun-rules.yaml"]
    (folder / "rules.yaml").write_text(rules)
    body = {
        "rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests,
    }  # fmt: skip
    (folder / "tests.yaml").write_text(yaml.safe_dump(body))
    return subprocess.run(
        ["promtool", "test", "rules", str(folder / "tests.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def fires(name: str, case: Case, **changed: str) -> Any:
    alert = BY_NAME[name]
    expected = {
        "exp_labels": {**case.labels, "severity": alert.severity},
        "exp_annotations": {
            "summary": case.summary,
            "description": alert.action,
            "dashboard": alert.board,
            **changed,
        },
    }
    return the_test(name, case.firing, case.at, exp_alerts=[expected])


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_keeps_silent(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tests = [fires(name, case)]
    tests += [the_test(name, series, case.at, exp_alerts=[]) for series in case.silent]
    done = run_promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_text_would_be_seen(tmp_path: Path) -> None:
    name = "OomrunHeadroomLow"
    done = run_promtool(tmp_path, [fires(name, CASES[name], summary="another")])
    assert done.returncode != 0


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(export.files("json")["oomrun-rules.yaml"])
    done = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in done.stdout


def test_what_is_recorded(tmp_path: Path) -> None:
    (name,) = RECORDED
    expected = {"expr": name, "eval_time": "5m", "exp_samples": [
        {"labels": f'{name}{{run="r"}}', "value": 0.03}]}  # fmt: skip
    series = the_test("OomrunStalled", {HEADROOM: "3x20", LIMIT: "100x20"}, "5m")
    done = run_promtool(tmp_path, [{**series, "promql_expr_test": [expected]}])
    assert done.returncode == 0, done.stdout + done.stderr
