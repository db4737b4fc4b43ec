"""The real pynvml on a library of ours: eight GPUs, MIG, failures, neighbours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import nvml_library
from nvml_library import GIB, RESERVED_BYTES, Machine, mig_uuid, uuid

CLI = """
import argparse, sys
from oomrun.cli import devices_command
parser = argparse.ArgumentParser()
devices_command.add_parser(parser.add_subparsers())
args = parser.parse_args()
sys.exit(args.run(args))
"""

FREE_BYTES = 80 * GIB - RESERVED_BYTES


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Machine:
    return Machine(library, tmp_path / "machine.txt")


def python(
    machine: Machine, code: str, *args: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        env=machine.environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
    )


def answer(machine: Machine, expression: str, **more: str) -> Any:
    """What an expression over ``oomrun.devices`` is worth in a process of its own."""
    code = (
        "import dataclasses, json, os, time\n"
        "from oomrun import devices\n"
        "from oomrun.core.topology import to_json\n"
        f"value = {expression}\n"
        "if dataclasses.is_dataclass(value): value = dataclasses.asdict(value)\n"
        "print(json.dumps(value))"
    )
    done = python(machine, code, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def inventory(machine: Machine, more: str = "", **environment: str) -> Any:
    return answer(
        machine, f"to_json(devices.discover(os.environ, {more}))", **environment
    )


def by_id(found: Any) -> dict[str, Any]:
    return {device["id"]: device for device in found["devices"]}


def test_eight_gpus(machine: Machine) -> None:
    found = inventory(machine)
    gpus = found["devices"][:-1]
    assert [gpu["id"] for gpu in gpus] == [uuid(n) for n in range(8)]
    assert [gpu["number"] for gpu in gpus] == list(range(8))
    assert found["driver_version"] == "555.42.02"
    assert found["problems"] == []
    assert found["devices"][-1]["id"] == "cpu:0"
    assert gpus[5] | {"processes": None} == {
        **dict.fromkeys(gpus[5]),
        "id": uuid(5),
        "kind": "gpu",
        "name": "NVIDIA H100 80GB HBM3",
        "index": 5,
        "number": 5,
        "total_bytes": 80 * GIB,
        "free_bytes": FREE_BYTES,
        "used_bytes": 0,
        "used_by_others_bytes": 0,
        "reserved_bytes": RESERVED_BYTES,
        "compute_capability": [9, 0],
        "pci_bus_id": "00000000:06:00.0",
        "nvlinks_active": 0,
        "mig_enabled": False,
    }


def test_visible_devices_are_taken_from_the_environment__pitfall_21(
    machine: Machine,
) -> None:
    found = inventory(machine, CUDA_VISIBLE_DEVICES="6,1,9")
    assert list(by_id(found)) == [uuid(6), uuid(1), "cpu:0"]
    assert "names 9, which is not on this machine" in found["problems"][0]


def test_numbers_are_ambiguous_between_unlike_gpus__pitfall_21(
    machine: Machine,
) -> None:
    machine.change({"0.name": "NVIDIA T4"})
    by_number = {"CUDA_VISIBLE_DEVICES": "0"}
    assert "fastest GPU first" in inventory(machine, **by_number)["problems"][0]
    for harmless in (
        {"CUDA_VISIBLE_DEVICES": "GPU-00000000"},
        by_number | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ):
        assert inventory(machine, **harmless)["problems"] == []


# --- MIG ----------------------------------------------------------------------------


def test_mig_devices_follow_their_gpu(machine: Machine) -> None:
    machine.add_mig(2, 3)
    found = inventory(machine)
    assert [device["id"] for device in found["devices"]][2:6] == [
        uuid(2),
        *(mig_uuid(2, n) for n in range(3)),
    ]
    assert found["problems"] == [], "MIG is a way to run a GPU, not a problem"
    assert by_id(found)[uuid(2)]["problem"].startswith("it is in MIG mode")
    mig = by_id(found)[mig_uuid(2, 1)]
    assert (mig["kind"], mig["parent"], mig["number"]) == ("mig", uuid(2), None)
    assert (mig["gpu_instance_id"], mig["compute_instance_id"]) == (8, 0)
    assert mig["total_bytes"] == 10 * GIB
    assert mig["compute_capability"] == [9, 0]


def test_a_failing_mig_device_leaves_the_others(machine: Machine) -> None:
    machine.add_mig(2, 3)
    for version in ("", "_v2"):
        machine.change({f"fail.nvmlDeviceGetMemoryInfo{version}.2.mig.1": 999})
    machine.change({"fail.nvmlDeviceGetUUID.2.mig.2": 3})
    found = inventory(machine)
    good, unread, nameless = found["devices"][3:6]
    assert good["problem"] is None
    assert "its memory cannot be read" in unread["problem"]
    assert nameless["id"] == f"{uuid(2)}/mig2"
    assert len(found["problems"]) == 2


def test_mig_mode_without_mig_devices(machine: Machine) -> None:
    machine.add_mig(2, 0)
    found = inventory(machine)
    assert len(found["devices"]) == 9
    assert "MIG mode is on, but it has no MIG devices" in found["problems"][0]


def test_one_mig_device_alone(machine: Machine) -> None:
    machine.add_mig(2, 3)
    found = inventory(machine, CUDA_VISIBLE_DEVICES=f"MIG-{uuid(2)}/9/0")
    assert list(by_id(found)) == [mig_uuid(2, 2), "cpu:0"]
    assert by_id(found)[mig_uuid(2, 2)]["number"] == 0
    memory = answer(machine, f"devices.memory_of({mig_uuid(2, 2)!r})")
    assert memory["free_bytes"] == 10 * GIB


# --- memory and neighbours ----------------------------------------------------------


def test_neighbours_and_own_processes__pitfall_22(machine: Machine) -> None:
    machine.change(
        {
            "0.processes": f"41:{10 * GIB},42:{20 * GIB}",
            "0.graphics": f"43:{GIB}",
            "0.used": 2 * GIB,
            "process.41": "/usr/bin/python3",
            "1.processes": "51:-",
        }
    )
    gpu = by_id(inventory(machine))[uuid(0)]
    assert gpu["free_bytes"] == FREE_BYTES - 33 * GIB
    assert gpu["used_by_others_bytes"] == 33 * GIB
    assert gpu["processes"] == [
        {"pid": 41, "name": "/usr/bin/python3", "used_bytes": 10 * GIB},
        {"pid": 42, "name": None, "used_bytes": 20 * GIB},
        {"pid": 43, "name": None, "used_bytes": GIB},
    ]
    found = by_id(inventory(machine, "own_pids=frozenset({42, 51})"))
    assert found[uuid(0)]["used_by_others_bytes"] == 13 * GIB
    assert found[uuid(1)]["used_by_others_bytes"] is None, "NVML hides 51's use"


def test_memory_of_a_device_is_what_it_is_now__pitfall_22(machine: Machine) -> None:
    machine.change({"3.processes": f"41:{GIB}"})
    assert answer(machine, f"devices.memory_of({uuid(3)!r})") == {
        "total_bytes": 80 * GIB,
        "free_bytes": FREE_BYTES - GIB,
        "used_bytes": GIB,
        "reserved_bytes": RESERVED_BYTES,
    }


@pytest.mark.parametrize("code", [13, 25, 3])
def test_a_driver_without_reserved_memory(machine: Machine, code: int) -> None:
    machine.change({"fail.nvmlDeviceGetMemoryInfo_v2": code})
    gpu = by_id(inventory(machine))[uuid(0)]
    assert gpu["reserved_bytes"] is None
    assert gpu["free_bytes"] == FREE_BYTES
    assert gpu["used_bytes"] == RESERVED_BYTES
    assert gpu["problem"] is None


def test_waiting_for_a_dead_process__pitfall_30(machine: Machine) -> None:
    machine.change({"0.processes": f"41:{60 * GIB}"})
    later = threading.Timer(1.5, machine.change, [{"0.processes": None}])
    later.start()
    wait = answer(
        machine,
        f"devices.wait_until_free({uuid(0)!r}, {70 * GIB}, timeout_s=20)",
    )
    later.join()
    assert wait["reached"]
    assert wait["memory"]["free_bytes"] == FREE_BYTES
    assert wait["waited_s"] < 10


def test_waiting_ends_when_a_neighbour_took_the_memory__pitfall_30(
    machine: Machine,
) -> None:
    machine.change({"0.processes": f"41:{60 * GIB}"})
    wait = answer(
        machine,
        f"devices.wait_until_free({uuid(0)!r}, {70 * GIB}, timeout_s=0.5)",
    )
    assert not wait["reached"]
    assert wait["memory"]["free_bytes"] == FREE_BYTES - 60 * GIB
    assert 0.5 <= wait["waited_s"] < 5


def test_waiting_ends_when_the_device_is_gone(machine: Machine) -> None:
    machine.change({"fail.nvmlDeviceGetHandleByUUID.0": 15})
    wait = answer(machine, f"devices.wait_until_free({uuid(0)!r}, 1, timeout_s=300)")
    assert not wait["reached"]
    assert "the GPU is lost" in wait["memory"]["reason"]


# --- NVLink -------------------------------------------------------------------------


def test_nvlink_direct_and_through_a_switch(machine: Machine) -> None:
    to_gpu_1 = {f"0.link.{n}.bus": "0000:02:00.0" for n in range(2)}
    to_gpu_1 |= {f"0.link.{n}.type": "0" for n in range(2)}
    machine.change(to_gpu_1 | {"0.links": 3, "0.link.2.down": 1})
    machine.change({"4.links": 2, "4.link.0.type": 2, "4.link.1.type": 2})
    machine.change({"5.links": 1, "5.link.0.type": 2})
    found = inventory(machine)
    assert found["nvlinks"] == [
        {"first": uuid(0), "second": uuid(1), "links": 2, "through_switch": False},
        {"first": uuid(4), "second": uuid(5), "links": 1, "through_switch": True},
    ]
    active = [device["nvlinks_active"] for device in found["devices"]]
    assert active == [2, 0, 0, 0, 2, 1, 0, 0, 0]


# --- no driver, half a driver, a broken device --------------------------------------


def test_no_driver(machine: Machine) -> None:
    done = python(machine, CLI, "devices", LD_LIBRARY_PATH="")
    assert done.returncode == 0
    assert "note: no NVIDIA driver: libnvidia-ml.so.1 was not found" in done.stdout
    assert "cpu:0" in done.stdout
    assert done.stderr == ""


def test_a_library_that_is_no_library(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("half an installation")
    found = inventory(machine, LD_LIBRARY_PATH=str(tmp_path))
    assert "no NVIDIA driver" in found["problems"][0]


def test_no_pynvml(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('it is not here')")
    shadow = {"PYTHONPATH": f"{tmp_path}:{machine.environment().get('PYTHONPATH', '')}"}
    found = inventory(machine, **shadow)
    assert "nvidia-ml-py does not load: it is not here" in found["problems"][0]
    assert list(by_id(found)) == ["cpu:0"]


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("nvmlInitWithFlags", 18, "are of different versions"),
        ("nvmlInitWithFlags", 9, "kernel driver is not loaded"),
        ("nvmlInitWithFlags", 4, "no permission"),
        ("nvmlInitWithFlags", 999, "unknown error"),
        ("nvmlInitWithFlags", 77, "fake NVML error 77 [NVML error 77]"),
        ("nvmlDeviceGetCount_v2", 999, "GPUs could not be read"),
    ],
)
def test_half_a_driver(machine: Machine, function: str, code: int, words: str) -> None:
    machine.change({f"fail.{function}": code})
    found = inventory(machine)
    assert list(by_id(found)) == ["cpu:0"]
    assert len(found["problems"]) == 1
    assert words in found["problems"][0]
    reading = answer(machine, f"devices.memory_of({uuid(0)!r})")
    assert "reason" in reading or function == "nvmlDeviceGetCount_v2"


DEVICE_CALLS = {
    "nvmlDeviceGetHandleByIndex_v2": True,
    "nvmlDeviceGetUUID": True,
    "nvmlDeviceGetMemoryInfo_v2": False,
    "nvmlDeviceGetName": False,
    "nvmlDeviceGetCudaComputeCapability": False,
    "nvmlDeviceGetPciInfo_v3": False,
    "nvmlDeviceGetMigMode": False,
    "nvmlDeviceGetComputeRunningProcesses_v3": False,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": False,
    "nvmlDeviceGetNvLinkState": False,
}


@pytest.mark.parametrize("code", [3, 15, 999])
@pytest.mark.parametrize("function", DEVICE_CALLS)
def test_one_failing_call_of_one_device(
    machine: Machine, function: str, code: int
) -> None:
    whole = by_id(inventory(machine))
    machine.change({f"fail.{function}.3": code})
    found = inventory(machine)
    hit = next(device for device in found["devices"] if device["index"] == 3)
    rest = [device for device in found["devices"] if device["kind"] == "gpu"]
    rest.remove(hit)
    assert rest == [gpu for gpu in whole.values() if gpu["index"] not in (3, None)]
    if DEVICE_CALLS[function]:
        assert hit["id"] == "gpu:3"
        assert f"[NVML error {code}]" in hit["problem"]
        assert found["problems"] == [f"GPU 3 ({hit['name']}): {hit['problem']}"]
    else:
        assert hit["id"] == uuid(3)
        assert hit["problem"] is None
        assert hit["free_bytes"] == FREE_BYTES


def test_a_driver_without_a_gpu(machine: Machine) -> None:
    machine.change({"gpus": 0})
    found = inventory(machine)
    assert found["driver_version"] == "555.42.02"
    assert "answers, but shows no GPU" in found["problems"][0]


def test_a_gpu_without_a_memory_reading_is_not_usable(machine: Machine) -> None:
    for version in ("", "_v2"):
        machine.change({f"fail.nvmlDeviceGetMemoryInfo{version}.3": 15})
    found = inventory(machine)
    assert "its memory cannot be read: the GPU is lost" in found["problems"][0]
    assert by_id(found)[uuid(3)]["problem"] is not None


def test_a_hanging_driver_does_not_hang_us(machine: Machine) -> None:
    machine.change({"hang.nvmlDeviceGetCount_v2": 120})
    started = time.monotonic()
    value = answer(
        machine,
        "[devices.discover({}, timeout_s=0.5).problems[0] for _ in range(2)]"
        f" + [devices.memory_of({uuid(0)!r}).reason]",
    )
    assert time.monotonic() - started < 20
    assert value[0].startswith("the NVIDIA driver did not answer within 0.5 s")
    assert value[1] == value[2] == "the NVIDIA driver still hangs in an earlier call"


def test_a_device_vanishes_and_comes_back_in_mid_run(machine: Machine) -> None:
    code = f"""
import sys
from oomrun import devices
with devices.held_open(10):
    for line in sys.stdin:
        print(devices.memory_of({uuid(1)!r}), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=machine.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            return process.stdout.readline()

        assert f"free_bytes={FREE_BYTES}" in ask()
        machine.change({"fail.nvmlDeviceGetHandleByUUID.1": 28})
        assert "Unreadable(reason='GPU-00000001" in ask()
        machine.change({"fail.nvmlDeviceGetHandleByUUID.1": None, "1.used": GIB})
        assert f"free_bytes={FREE_BYTES - GIB}" in ask()
        process.stdin.close()
        assert process.wait(timeout=20) == 0


# --- the command --------------------------------------------------------------------


def test_the_table(machine: Machine) -> None:
    machine.add_mig(7, 1)
    machine.change({"1.processes": f"41:{30 * GIB}", "process.41": "python"})
    machine.change({"fail.nvmlDeviceGetHandleByIndex_v2.3": 15})
    done = python(machine, CLI, "devices")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        *("DEVICE", "NAME", "TOTAL", "FREE", "RESERVED", "OTHERS'", "USE")
    ]
    assert lines[2].split()[:2] == ["1", "GPU-00000001"]
    assert lines[2].split()[-4:] == ["80GiB", "49.4GiB", "600MiB", "30GiB"]
    assert "gpu:3" in lines[4]
    assert "(not usable)" in lines[4]
    assert "(in MIG mode)" in lines[8]
    assert "   MIG-70000000" in lines[9]
    assert "   GPU-00000001: pid 41 (python) holds 30GiB" in lines
    assert "NVIDIA driver  555.42.02" in lines
    assert lines[-1].startswith("note: GPU 3 (unknown GPU): the GPU is lost")


def test_short_ids_stay_unique(machine: Machine) -> None:
    machine.change({"1.uuid": uuid(0)[:-1] + "7"})
    ids = [
        line[3:].split()[0]
        for line in python(machine, CLI, "devices").stdout.splitlines()[1:3]
    ]
    assert ids == [uuid(0), uuid(0)[:-1] + "7"]


def test_json(machine: Machine) -> None:
    done = python(machine, CLI, "devices", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["devices"]) == 9


@pytest.fixture
def watching(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CLI, "devices", "--watch", "0.1", "--json"],
        env=machine.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_watch_follows_a_neighbour_until_ctrl_c(
    machine: Machine, watching: subprocess.Popen[str]
) -> None:
    assert watching.stdout is not None

    def until(free_bytes: int) -> None:
        """Reads on until GPU 0 has that much free; the test's time limit bounds it."""
        assert watching.stdout is not None
        for line in watching.stdout:
            if json.loads(line)["devices"][0]["free_bytes"] == free_bytes:
                return

    until(FREE_BYTES)
    machine.change({"0.processes": f"41:{GIB}"})
    until(FREE_BYTES - GIB)
    machine.change({"0.processes": None})
    until(FREE_BYTES)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=20) == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_watch_refuses_what_is_no_time(machine: Machine, seconds: str) -> None:
    done = python(machine, CLI, "devices", f"--watch={seconds}")
    assert done.returncode == 2
    assert "is not a number of seconds above 0" in done.stderr


def test_the_command_loads_nothing_heavy(machine: Machine) -> None:
    code = (
        "import sys\n"
        "from oomrun.cli import devices_command\n"
        "print({'pynvml', 'rich', 'tensorflow', 'psutil'} & set(sys.modules))"
    )
    assert python(machine, code).stdout == "set()\n"
