"""The metrics of a run: what they say, how they are served, what cannot break them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

import scenarios
from oomrun import metrics
from oomrun.core import events as ev
from oomrun.core.state import RESTART_CAUSES, JobState, replay
from oomrun.core.tally import LOSS_REASONS
from oomrun.metrics import catalogue
from oomrun.metrics.device_families import OOM_PHASES
from oomrun.metrics.exporter import patience_s
from oomrun.metrics.run_families import RUN_STATES

MIB = scenarios.MIB
FOREVER_S = 10.0**6


def registry(*states: JobState) -> CollectorRegistry:
    """A registry with the metrics of these runs."""
    found = CollectorRegistry()
    found.register(catalogue.JobStateCollector(lambda: states))
    return found


def value(state: JobState, name: str, **labels: str) -> float | None:
    """One sample of the run, as a scrape would see it."""
    return registry(state).get_sample_value(name, {"run": state.name, **labels})


class Served:
    """An exporter whose state a test sets."""

    def __init__(self) -> None:
        self.state = replay(scenarios.opening())
        self.exporter = metrics.start("127.0.0.1", 0, lambda: self.state)

    def get(self, path: str = "/metrics", accept: str = "") -> tuple[int, str, str]:
        """Status, content type, body."""
        host, port = self.exporter.address
        request = urllib.request.Request(
            f"http://{host}:{port}{path}", headers={"Accept": accept}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                body = reply.read().decode()
                return reply.status, reply.headers["Content-Type"], body
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.exporter.close()


CPU = {"rank": "0", "device": "cpu:0", "device_kind": "cpu"}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("oomrun_run_state", {"oomrun_run_state": "completed"}, 1),
        ("oomrun_run_state", {"oomrun_run_state": "training"}, 0),
        ("oomrun_restarts_total", {"reason": "oom"}, 1),
        ("oomrun_restarts_total", {"reason": "hang"}, 0),
        ("oomrun_lost_steps_total", {"reason": "oom"}, 5),
        ("oomrun_steps_total", {}, 105),  # 100, and 5 that were trained twice
        ("oomrun_samples_total", {}, 105 * 256),
        ("oomrun_step", {}, 100),
        ("oomrun_step_duration_seconds_count", {}, 105),
        ("oomrun_step_duration_seconds_bucket", {"le": "0.1"}, 0),
        ("oomrun_step_duration_seconds_bucket", {"le": "0.25"}, 105),
        ("oomrun_epoch", {}, 5),
        ("oomrun_global_batch_size", {}, 256),
        ("oomrun_micro_batch_size", {}, 64),
        ("oomrun_gradient_accumulation_steps", {}, 4),
        ("oomrun_replicas", {}, 1),
        ("oomrun_workers_expected", {}, 0),
        ("oomrun_workers_alive", {}, 0),
        ("oomrun_checkpoint_size_bytes", {}, 12 * MIB),
        ("oomrun_checkpoint_duration_seconds_count", {}, 1),
        ("oomrun_checkpoint_failures_total", {}, 0),
        ("oomrun_run_start_timestamp_seconds", {}, scenarios.START),
        (
            "oomrun_run_end_timestamp_seconds",
            {"status": "completed"},
            scenarios.START + 41.3,
        ),
        ("oomrun_device_memory_limit_bytes", CPU, 600 * MIB),
        ("oomrun_device_memory_peak_bytes", CPU, 260 * MIB),
        ("oomrun_device_memory_in_use_bytes", CPU, 150 * MIB),
        ("oomrun_device_memory_predicted_peak_bytes", CPU, 235 * MIB),
        ("oomrun_device_memory_headroom_bytes", CPU, 340 * MIB),
        (
            "oomrun_adaptations_total",
            {"action": "micro_batch", "direction": "shrink", "trigger": "oom"},
            2,
        ),
        (
            "oomrun_oom_events_total",
            {"rank": "0", "device": "cpu:0", "kind": "device", "phase": "gradients"},
            1,
        ),
        ("oomrun_recovery_duration_seconds_count", {"reason": "in_process"}, 1),
        ("oomrun_recovery_duration_seconds_count", {"reason": "oom"}, 1),
        ("oomrun_worker_last_heartbeat_timestamp_seconds", {"rank": "0"}, None),
    ],
)
def test_values_of_a_completed_run(
    name: str, labels: dict[str, str], expected: float | None
) -> None:
    found = value(replay(scenarios.whole()), name, **labels)
    if expected is None:
        assert found is not None
    else:
        assert found == pytest.approx(expected)


def test_recovery_takes_from_the_oom_to_the_next_progress() -> None:
    state = replay(scenarios.whole())
    name = "oomrun_recovery_duration_seconds_sum"
    assert value(state, name, reason="in_process") == pytest.approx(1.0)
    assert value(state, name, reason="oom") == pytest.approx(13.0)


def test_no_peak_is_missed_between_two_scrapes() -> None:
    high = scenarios.progressed(6, 10, memory=scenarios.memory(150, 500))
    low = scenarios.progressed(7, 15, memory=scenarios.memory(150, 300))
    state = replay([*scenarios.opening(), high, low])
    assert value(state, "oomrun_device_memory_peak_bytes", **CPU) == 500 * MIB


def test_every_counter_is_there_from_the_first_attempt_on() -> None:
    state = replay(scenarios.opening()[:2])
    for phase in OOM_PHASES:
        labels = {"rank": "0", "device": "cpu:0", "kind": "device", "phase": phase}
        assert value(state, "oomrun_oom_events_total", **labels) == 0
    for reason in RESTART_CAUSES:
        assert value(state, "oomrun_restarts_total", reason=reason) == 0
    for reason in LOSS_REASONS:
        assert value(state, "oomrun_lost_steps_total", reason=reason) == 0


def test_steps_are_lost_for_a_cause_of_restarts_or_by_a_resume() -> None:
    assert set(LOSS_REASONS) == {*RESTART_CAUSES, "resume"}


def test_gpus_join_with_other_exporters_by_uuid() -> None:
    device = {**scenarios.PLAN["devices"][0], "id": "GPU-4f2a", "kind": "gpu"}
    plan = {**scenarios.PLAN, "devices": [device]}
    started, attempt = scenarios.opening()[:2]
    state = replay([started, type(attempt)(at=1.0, attempt=1, plan=plan)])  # type: ignore[call-arg]
    labels = {"rank": "0", "device": "GPU-4f2a", "UUID": "GPU-4f2a", "uuid": "4f2a"}
    assert value(state, "oomrun_gpu_info", **labels) == 1


def test_several_runs_share_their_families() -> None:
    other = scenarios.opening()
    other[0] = type(other[0])(  # type: ignore[call-arg]
        at=1.0, run_id="r-2", name="other", version="0", seed=1, mathematics={}
    )
    both = registry(replay(scenarios.whole()), replay(other))
    assert both.get_sample_value("oomrun_step", {"run": "digits"}) == 100
    assert both.get_sample_value("oomrun_step", {"run": "other"}) == 5
    text = generate_latest(both).decode()
    assert text.count("# TYPE oomrun_step gauge") == 1


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("cut", [0, 2, 7, 100])
def test_promtool_finds_nothing_to_complain_about(cut: int) -> None:
    text = generate_latest(registry(replay(scenarios.whole()[:cut])))
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (check.returncode, check.stderr, check.stdout) == (0, b"", b"")


def test_both_formats_by_accept(served: Served) -> None:
    status, kind, text = served.get()
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    parsed = list(text_string_to_metric_families(text))
    names = {family.name for family in parsed}
    assert "oomrun_run_state" in names
    status, kind, text = served.get(accept="application/openmetrics-text;version=1.0.0")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    found = parse_openmetrics(text)  # type: ignore[no-untyped-call]
    families = {family.name: family for family in found}
    assert families["oomrun_run_state"].type == "stateset"
    assert families["oomrun_device_memory_limit_bytes"].unit == "bytes"
    assert "_created" not in text


def test_what_is_counted_leads_to_its_attempt_and_step(served: Served) -> None:
    served.state = state = replay(scenarios.whole())
    accept = "application/openmetrics-text;version=1.0.0"
    found = parse_openmetrics(served.get(accept=accept)[2])  # type: ignore[no-untyped-call]
    traced = {
        (family.name, sample.labels.get("phase") or sample.labels.get("reason")): (
            sample.exemplar.labels,
            sample.exemplar.timestamp,
        )
        for family in found
        for sample in family.samples
        if sample.exemplar
    }
    ooms = [e for e in scenarios.whole() if isinstance(e, ev.OomOccurred)]
    assert {e.phase for e in ooms} == {
        phase for name, phase in traced if name == "oomrun_oom_events"
    }
    for event in ooms:
        labels, at = traced["oomrun_oom_events", event.phase]
        assert labels["run_id"] == state.run_id
        assert (labels["attempt"], labels["step"]) == (
            str(event.attempt), str(event.step),
        )  # fmt: skip
        assert float(at) == event.at
    assert traced["oomrun_restarts", "oom"][0]["attempt"] == "1"
    assert "# {" not in served.get()[2]  # the older format has no place for them


def test_health_and_readiness(served: Served) -> None:
    assert served.get("/healthz")[::2] == (200, "ok\n")
    assert served.get("/readyz")[::2] == (200, "training\n")
    served.state = JobState()
    assert served.get("/readyz")[::2] == (503, "pending\n")
    assert served.get("/healthz")[0] == 200
    status, _, text = served.get()
    assert status == 200
    assert "oomrun_build_info" in text
    assert 'run=""' not in text


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert served.get("/etc/passwd")[0] == 404
    request = urllib.request.Request(served.exporter.url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value:
        assert refused.value.code == 501


def test_a_state_that_cannot_be_had_is_an_answer_not_a_crash() -> None:
    def broken() -> JobState:
        raise RuntimeError("no state")

    served = Served()
    served.exporter.close()
    served.exporter = metrics.start("127.0.0.1", 0, broken)
    assert served.get()[0] == 500
    assert served.get("/healthz")[0] == 200
    served.exporter.close()


def test_broken_clients_do_not_block_others(served: Served) -> None:
    silent = [socket.create_connection(served.exporter.address) for _ in range(10)]
    half = socket.create_connection(served.exporter.address)
    half.sendall(b"GET /metrics HT")
    gone = socket.create_connection(served.exporter.address)
    gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    gone.close()
    assert served.get()[0] == 200  # one after the other they would take 50 s
    for client in [*silent, half]:
        client.close()


def test_too_many_clients_are_sent_away_and_later_ones_served(served: Served) -> None:
    crowd = [socket.create_connection(served.exporter.address) for _ in range(80)]
    for client in crowd:
        client.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert served.get()[0] == 200
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("no client is served any more")


def test_a_taken_port_gives_the_next_one_and_says_so() -> None:
    first = metrics.start("127.0.0.1", 0, JobState)
    port = first.address[1]
    second = metrics.start("127.0.0.1", port, JobState)
    assert port < second.address[1] <= port + 20
    assert second.note == f"port {port} is taken; metrics are at {second.url}"
    with pytest.raises(metrics.ExporterError, match=f"127.0.0.1:{port}: .* in use"):
        metrics.start("127.0.0.1", port, JobState, port_taken="error")
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("host", "port"),
    [("192.0.2.1", 9464), ("no such host", 9464), ("127.0.0.1", 70000)],
)
def test_an_address_that_cannot_be_had_is_one_plain_error(host: str, port: int) -> None:
    with pytest.raises(metrics.ExporterError, match=r"cannot be served|no port"):
        metrics.start(host, port, JobState)


def test_closing_twice_frees_the_port_once(served: Served) -> None:
    served.exporter.close()
    served.exporter.close()
    again = metrics.start("127.0.0.1", served.exporter.address[1], JobState)
    assert again.address == served.exporter.address
    again.close()


@pytest.mark.parametrize(
    ("scraped_at", "now", "expected"),
    [
        ((), 7.0, 0.0),  # nobody scrapes
        ((1.0,), 1.0, 60.0),  # one scrape says nothing of the interval
        ((1.0, 16.0), 17.0, 36.5),
        ((1.0, 16.0), 53.5, 0.0),  # two intervals and a half have passed: it is gone
        ((1.0, 16.0), 60.0, -6.5),
        ((1.0, 16.0, 17.0), 17.0, 37.5),  # the longest gap counts
        ((0.0, 300.0), 301.0, 60.0),
    ],
)
def test_the_end_waits_two_and_a_half_intervals_at_most(
    scraped_at: tuple[float, ...], now: float, expected: float
) -> None:
    assert patience_s(scraped_at, max_s=60.0, now=now) == expected


def test_nobody_waits_for_a_scraper_that_never_came(served: Served) -> None:
    assert not served.exporter.linger(FOREVER_S)


def test_the_end_waits_for_two_more_scrapes(served: Served) -> None:
    """Also where it follows the reply to a scrape at once: that one has counted."""
    for _ in range(25):
        exporter = metrics.start("127.0.0.1", 0, lambda: served.state)
        ended = threading.Event()
        scraper = threading.Thread(target=scrape_until, args=(exporter.url, ended))
        urllib.request.urlopen(exporter.url, timeout=10).close()
        scraper.start()
        assert exporter.linger(FOREVER_S)
        ended.set()
        scraper.join()
        exporter.close()


def test_the_end_takes_no_single_scrape_for_two(served: Served) -> None:
    urllib.request.urlopen(served.exporter.url, timeout=10).close()
    later = threading.Timer(
        0.2, lambda: urllib.request.urlopen(served.exporter.url, timeout=10).close()
    )
    later.start()
    assert not served.exporter.linger(1.0)
    later.join()


def scrape_until(url: str, ended: threading.Event) -> None:
    """Scrapes again and again."""
    while not ended.wait(0.01):
        urllib.request.urlopen(url, timeout=10).close()


def test_states_in_metrics_and_status_are_the_same_words() -> None:
    states = {state.state for state, _ in scenarios.states(scenarios.whole())}
    assert states <= set(RUN_STATES)
    assert json.dumps(RUN_STATES)
