"""Debian's Prometheus scrapes a real run, and knows what the journal says."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import certificates
from prometheus_server import Prometheus, wait_for

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"),
    reason="prometheus is not installed (apt-get install prometheus)",
)

TOKEN = "a-token-for-this-test-alone"
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: oomrun
    scheme: https
    tls_config: {{ca_file: ca.pem}}
    authorization: {{credentials_file: token}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: without a token
    scheme: https
    tls_config: {{ca_file: ca.pem}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: without tls
    authorization: {{credentials_file: token}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

JOB = """
name: watched
script: {script}
args: ["--epochs", "4", "--size", "64", "--output", "weights.npz"]
devices: {{cpu: 1, memory: [150MiB]}}
memory: {{probe: never}}
metrics:
  listen: "127.0.0.1:{port}"
  tls: {{certificate: server.pem, key: server.key}}
  token: {{env: METRICS_TOKEN}}
  textfile: node.prom
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def prometheus(tmp_path: Path, port: int) -> Iterator[Prometheus]:
    certificates.make(tmp_path)
    (tmp_path / "token").write_text(TOKEN + "\n")
    options = "--enable-feature=exemplar-storage"
    server = Prometheus(tmp_path, CONFIG.format(port=port), options)
    yield server
    server.close()


@pytest.fixture
def run(tmp_path: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real run that runs out of memory; it is ended with the test."""
    script = ROOT / "configs" / "quickstart" / "train.py"
    (tmp_path / "job.yaml").write_text(JOB.format(script=script, port=port))
    process = subprocess.Popen(
        [sys.executable, "-m", "oomrun", "job.yaml", "--log-format", "json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "METRICS_TOKEN": TOKEN,
        },
    )
    yield process
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def refused(prometheus: Prometheus, job: str, why: str) -> bool:
    """Whether the last scrape of ``job`` failed so."""
    (target,) = (t for t in prometheus.targets() if t["labels"]["job"] == job)
    return target["health"] == "down" and bool(re.search(why, target["lastError"]))


def journal(folder: Path) -> list[dict[str, Any]]:
    """The journal as it stands on disk, read without oomrun's own reader."""
    text = (folder / "runs" / "watched" / "journal.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def of_type(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The events of one type."""
    return [event for event in events if event["type"] == name]


def ooms(events: list[dict[str, Any]]) -> int:
    """How often memory ran out: reported, or seen by how an attempt ended."""
    count, told = 0, False
    for event in events:
        if event["type"] == "attempt_started":
            told = False
        elif event["type"] == "oom_occurred":
            count, told = count + 1, event["recovery"] == "restart"
        elif event["type"] == "attempt_ended" and event["cause"] == "device_oom":
            count += not told
    return count


def test_what_prometheus_knows_is_what_the_journal_says(
    prometheus: Prometheus, run: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    wait_for(lambda: prometheus.one("up == 1"), "the endpoint", 60)
    refusals = {
        "without a token": "server returned HTTP status 401 Unauthorized",
        "without tls": "EOF|connection reset|400",
    }
    for name, why in refusals.items():
        wait_for(lambda: refused(prometheus, name, why), f"{name}: {why}", 60)  # noqa: B023
    wait_for(
        lambda: prometheus.one('oomrun_run_state{oomrun_run_state="training"} == 1'),
        "the run to train",
        180,
    )
    started = of_type(journal(tmp_path), "attempt_started")[-1]
    environment = Path(f"/proc/{started['pids'][0]}/environ").read_bytes()
    assert b"OOMRUN_" in environment
    assert TOKEN.encode() not in environment
    assert prometheus.one("sum(oomrun_build_info)") == 1
    assert prometheus.one("oomrun_workers_alive") == 1
    limit = prometheus.one("oomrun_device_memory_limit_bytes")
    assert limit == 150 * 2**20

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err.decode()
    events = journal(tmp_path)
    assert [json.loads(line)["event"]["type"] for line in out.splitlines()][-1] == (
        "run_ended"
    )

    progress = of_type(events, "progressed")
    last = progress[-1]
    steps = sum(event["window_steps"] for event in progress)
    seconds = sum(event["window_steps"] * event["step_s"] for event in progress)
    assert prometheus.last("oomrun_steps_total") == steps
    assert prometheus.last("oomrun_step_duration_seconds_count") == steps
    assert prometheus.last("oomrun_step_duration_seconds_sum") == pytest.approx(seconds)
    assert prometheus.last("oomrun_samples_total") == last["samples"]
    assert prometheus.last("oomrun_step") == last["step"]
    assert prometheus.last("oomrun_epoch") == last["epoch"] == 4
    assert prometheus.last("oomrun_loss") == pytest.approx(last["loss"])
    assert prometheus.last("oomrun_global_batch_size") == 256
    assert prometheus.last("oomrun_micro_batch_size") == last["micro_batch_size"] < 256

    assert ooms(events) >= 1
    counted = prometheus.one("sum(last_over_time(oomrun_oom_events_total[15m]))")
    assert counted == ooms(events)
    # Every series was there at 0 before: Prometheus can tell that it rose.
    assert prometheus.one("sum(min_over_time(oomrun_oom_events_total[15m]))") == 0
    assert prometheus.one("sum(resets(oomrun_oom_events_total[15m]))") == 0
    run_id = of_type(events, "run_started")[0]["run_id"]
    exemplars = prometheus.exemplars("oomrun_oom_events_total", events[0]["at"])
    assert {one["run_id"] for one in exemplars} == {run_id}
    told = {str(event["attempt"]) for event in of_type(events, "oom_occurred")}
    assert {one["attempt"] for one in exemplars} >= told
    changes = of_type(events, "micro_batch_changed")
    adapted = prometheus.one("sum(last_over_time(oomrun_adaptations_total[15m]))")
    restarts = [
        event
        for event in of_type(events, "decision_made")
        if event["action"] == "restart"
    ]
    assert adapted == len(changes) + sum(
        event["micro_batch_size"] is not None for event in restarts
    )
    assert prometheus.one("sum(last_over_time(oomrun_restarts_total[15m]))") == len(
        restarts
    )

    saved = of_type(events, "checkpoint_saved")
    assert prometheus.last("oomrun_checkpoint_duration_seconds_count") == len(saved)
    assert prometheus.last("oomrun_checkpoint_size_bytes") == saved[-1]["size_bytes"]
    ended = of_type(events, "run_ended")[0]
    # The exporter stayed for the scrape that sees the end.
    assert prometheus.last("oomrun_run_end_timestamp_seconds") == pytest.approx(
        ended["at"]
    )
    completed = 'oomrun_run_state{oomrun_run_state="completed"}'
    assert prometheus.last(completed) == 1

    assert prometheus.query('count_over_time(up{job!="oomrun"}[15m]) > 0')
    assert not prometheus.query('up{job!="oomrun"} == 1')
    written = (tmp_path / "node.prom").read_text()
    assert 'oomrun_run_state="completed",run="watched"} 1.0' in written
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=written, text=True, capture_output=True
    )
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
    # The token is nowhere but where it was put: no log, no journal, no worker has it.
    everything = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "token"]
    assert any(path.name == "journal.jsonl" for path in everything)
    assert not [p for p in everything if TOKEN.encode() in p.read_bytes()]
    assert TOKEN.encode() not in out + err
