"""``oomrun monitor``: the runs and devices of a machine at one endpoint.

NVML is our library under the real pynvml; runs have a worker without TensorFlow.
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from killable import drive, wait_for
from prometheus_client.parser import text_string_to_metric_families

import certificates
from nvml_library import GIB, Machine, mig_uuid, uuid
from oomrun.cli import main
from oomrun.core import events as ev

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def command(
    folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """``oomrun monitor`` in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-m", "oomrun", "monitor", *options],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**(env or os.environ), "PYTHONPATH": path},
    )  # fmt: skip


def samples(text: str) -> Samples:
    """Values by name and labels, as Prometheus reads them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def once(folder: Path, env: Mapping[str, str]) -> tuple[str, Samples]:
    """What ``--once`` prints."""
    out, err = command(folder, "--once", env=env).communicate(timeout=120)
    assert err == ""
    return out, samples(out)


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's runs are the only ones that the machine knows of."""
    found = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(found))
    return found


@pytest.mark.usefixtures("state")
def test_devices_are_told_of_when_nothing_runs(machine: Machine, folder: Path) -> None:
    machine.add_mig(1, 1)
    machine.change(
        {"0.utilization": 87, "0.temperature": 61, "0.power": 312500, "0.used": GIB}
    )
    text, found = once(folder, machine.environment())
    gpu = {"device": uuid(0), "device_kind": "gpu"}
    assert found[key("oomrun_gpu_memory_total_bytes", **gpu)] == 80 * GIB
    assert found[key("oomrun_gpu_memory_used_bytes", **gpu)] == GIB
    assert found[key("oomrun_gpu_utilization_ratio", **gpu)] == 0.87
    assert found[key("oomrun_gpu_temperature_celsius", **gpu)] == 61
    assert found[key("oomrun_gpu_power_watts", **gpu)] == 312.5
    other = {"device": uuid(2), "device_kind": "gpu"}
    assert key("oomrun_gpu_power_watts", **other) not in found  # it does not tell
    part = {"device": mig_uuid(1, 0), "device_kind": "mig"}
    assert found[key("oomrun_gpu_memory_total_bytes", **part)] == 10 * GIB
    hardware = key(
        "oomrun_gpu_hardware_info", device=mig_uuid(1, 0), UUID=uuid(1),
        uuid=uuid(1).removeprefix("GPU-"), GPU_I_ID="7",
        model="NVIDIA H100 80GB HBM3 MIG 1g.10gb", driver_version="555.42.02",
    )  # fmt: skip
    assert found[hardware] == 1
    assert found[key("oomrun_collector_success", collector="nvml")] == 1
    limit = found[key("oomrun_host_memory_limit_bytes")]
    assert 0 < found[key("oomrun_host_memory_used_bytes")] <= limit
    if shutil.which("promtool"):
        check = subprocess.run(
            ["promtool", "check", "metrics"], input=text, text=True, capture_output=True
        )
        assert (check.returncode, check.stdout + check.stderr) == (0, "")


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"fail.nvmlInitWithFlags": 12}, None),  # no driver: nothing to succeed at
        ({"fail.nvmlInitWithFlags": 18}, 0),
        ({"fail.nvmlDeviceGetCount_v2": 15}, 0),
        ({"fail.nvmlDeviceGetHandleByIndex_v2.3": 15}, 0),
        ({"hang.nvmlDeviceGetCount_v2": 600}, 0),
        ({"fail.nvmlDeviceGetTemperature": 3, "fail.nvmlDeviceGetPowerUsage": 3}, 1),
    ],
)
def test_a_driver_that_fails_costs_its_own_metrics_alone(
    fault: Mapping[str, int], said: int | None, machine: Machine, folder: Path
) -> None:
    machine.change(fault)
    _, found = once(folder, machine.environment())
    assert found.get(key("oomrun_collector_success", collector="nvml")) == said
    assert found[key("oomrun_collector_success", collector="host")] == 1
    told = [name for name, _ in found if name == "oomrun_gpu_memory_total_bytes"]
    assert len(told) == (8 if said else 0)


@pytest.fixture
def served(folder: Path, state: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and where its metrics are."""
    certificates.make(folder)
    (folder / "token").write_text("a-token\n")
    process = command(
        folder, "--listen", "127.0.0.1:0", "--certificate", "server.pem",
        "--key", "server.key", "--token", "token",
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said.startswith("oomrun: metrics are at https://127.0.0.1:")
    yield process, said.rpartition(" ")[2].strip()
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_runs_are_seen_from_their_start_to_after_their_end(
    served: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    process, url = served
    request = urllib.request.Request(url, headers={"Authorization": "Bearer a-token"})
    trust = ssl.create_default_context(cafile=folder / "ca.pem")

    def scrape() -> Samples:
        with urllib.request.urlopen(request, timeout=30, context=trust) as reply:
            return samples(reply.read().decode())

    def state(name: str) -> float | None:
        return scrape().get(
            key("oomrun_run_state", run="killable", oomrun_run_state=name)
        )

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=30, context=trust)
    assert key("oomrun_steps_total", run="killable") not in scrape()
    run = drive(folder, "kills-itself-once")
    wait_for(folder, ev.Progressed)
    while state("completed") != 1:
        assert run.poll() in (None, 0), (folder / "said").read_text()
        time.sleep(0.05)
    assert run.wait(60) == 0
    found = scrape()
    assert found[key("oomrun_restarts_total", run="killable", reason="crash")] == 1
    assert found[key("oomrun_epoch", run="killable")] == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "9463"], "is no address such as 127.0.0.1:9463"),
        (["--certificate", "x.pem"], "--certificate and --key go together"),
        (["--client-ca", "x.pem"], "--client-ca needs --certificate and --key"),
        (["--user", "x"], "--user and --password go together"),
        (["--user", "x:y", "--password", "p"], "a user name has no colon"),
        (["--token", "t", "--user", "x", "--password", "p"], "either --token or"),
        (["--keep", "15"], "is no time such as 30s"),
    ],
)
def test_what_the_command_line_gets_wrong(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("state")
def test_a_port_that_is_taken_is_one_plain_error(
    served: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    address = served[1].removeprefix("https://").removesuffix("/metrics")
    process = command(folder, "--listen", address)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert err.startswith(f"oomrun: metrics cannot be served at {address}")
    assert err.count("\n") == 1
