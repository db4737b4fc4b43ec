"""No driver, half a driver, and each NVML call failing, hanging or missing in turn.

The real pynvml asks; ``test_devices.py`` has what it is told when all is well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from fake_machine import CLI, FREE_BYTES, answer, by_id, inventory, python

import nvml_library
from nvml_library import GIB, Machine, mig_uuid, uuid
from oomrun.core import events as ev


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


def test_gpus_that_tensorflow_does_not_see_end_the_run_at_once(
    machine: Machine, tmp_path: Path
) -> None:
    more = "devices: gpu\nstrategy: single\n"
    job = jobs.make(tmp_path / "job", "print('trained')\n", more)
    assert job.run(env=machine.environment()) == 4, job.everything()
    assert len(job.events(ev.AttemptStarted)) == 1
    assert "gives this worker 1 GPU, but TensorFlow" in job.log(1)
    assert "trained" not in job.log(1)
    assert "Traceback" not in job.log(1)


# --- each call, each error ----------------------------------------------------------

# Asks the machine again and again in one process, and prints what went wrong.
TABLE = """
import json, os, sys
import pynvml
from pathlib import Path
from nvml_library import Machine, functions, mig_uuid, uuid
from oomrun import devices
from oomrun.cli.devices_command import render
from oomrun.core.topology import Memory, to_json

library, description = map(Path, (os.environ["LD_LIBRARY_PATH"], sys.argv[1]))
machine = Machine(library, description, gpus=3)
machine.add_mig(2, 2)
machine.change({"0.links": 1, "0.link.0.type": 2, "1.links": 1, "1.link.0.type": 2,
                "0.processes": "41:1000", "process.41": "python"})
codes = sorted({v for n, v in vars(pynvml).items() if n.startswith("NVML_ERROR_")})
ids = [uuid(0), uuid(1), mig_uuid(2, 0)]
whole = {d["id"]: d for d in to_json(devices.discover({}))["devices"][:-1]}
wrong, asked, unusable, fewer = [], 0, {}, set()


def look(function, code, scope):
    global asked
    asked += 1
    found = devices.discover({})
    shown = json.loads(json.dumps(to_json(found)))["devices"]
    assert shown.pop()["id"] == "cpu:0"
    text = render(found)
    if len(shown) < len(whole):
        fewer.add(function)
    for device in found.devices:
        sizes = device.total_bytes, device.free_bytes, device.used_bytes
        if device.usable:
            assert None not in sizes, f"{device.id} is usable, but not known"
        elif not device.mig_enabled or device.problem != whole[uuid(2)]["problem"]:
            assert any(device.problem in problem for problem in found.problems)
            # An empty MIG slot is told by two of the numbers.
            empty = code in (2, 6) and "has no MIG devices" in device.problem
            assert empty or f"[NVML error {code}]" in device.problem, device.problem
            unusable.setdefault(function, []).append(code)
    if not any(d.usable and d.kind == "gpu" for d in found.devices):
        assert found.problems, "no GPU, and no word why"
    for problem in found.problems:
        assert f"note: {problem}" in text
    for name in ids:
        memory = devices.memory_of(name)
        if not isinstance(memory, Memory):
            assert f"[NVML error {code}]" in memory.reason, memory.reason
    if scope == ".1":
        rest = {d["id"]: d for d in shown if d["index"] != 1}
        links = {uuid(0): {"nvlinks_active"}}
        for name in rest:
            for fact in set(whole[name]) - links.get(name, set()):
                assert rest[name][fact] == whole[name][fact], (name, fact)


for function in functions():
    for code in codes:
        for scope in ("", ".1", ".2.mig.0") if code in (3, 15, 999) else ("",):
            key = f"fail.{function}{scope}"
            machine.change({key: code})
            try:
                look(function, code, scope)
            except Exception as error:
                wrong.append([key, code, repr(error)])
            machine.change({key: None})
assert {d["id"]: d for d in to_json(devices.discover({}))["devices"][:-1]} == whole
print(json.dumps({"asked": asked, "wrong": wrong, "unusable": unusable,
                  "fewer": sorted(fewer), "codes": len(codes)}))
"""


def test_each_call_with_each_error_leaves_words_and_the_rest(
    machine: Machine, library: Path, tmp_path: Path
) -> None:
    description = tmp_path / "table.txt"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TABLE, str(description)],
        env=machine.environment(
            OOMRUN_FAKE_NVML=str(description),
            PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["wrong"] == []
    each = table["codes"] + 3 * 2  # three of them also for one device alone
    assert table["asked"] == len(nvml_library.functions()) * each
    # These take a device away; without any other call it can still be trained on.
    assert sorted(table["unusable"]) == [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
    ]
    assert table["fewer"] == [
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetMigMode",
        "nvmlInitWithFlags",
    ]


@pytest.mark.parametrize("function", nvml_library.functions())
def test_a_driver_that_lacks_a_function(tmp_path: Path, function: str) -> None:
    lacking = nvml_library.build(tmp_path / "library", without=[function])
    machine = Machine(lacking, tmp_path / "machine.txt", gpus=2)
    machine.add_mig(1, 1)
    found = inventory(machine)
    gpus = [device for device in found["devices"] if device["problem"] is None]
    if function in NEEDED:
        assert [device["id"] for device in gpus] == ["cpu:0"]
        assert "too old for this call" in found["problems"][0]
    else:
        assert gpus[0]["free_bytes"] == FREE_BYTES
        assert gpus[0]["id"] == uuid(0)


NEEDED = {
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
}


def test_an_old_driver_tells_less_but_enough(tmp_path: Path) -> None:
    old = NEEDED | {
        "nvmlShutdown",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetMemoryInfo",
    }
    lacking = sorted(set(nvml_library.functions()) - old)
    library = nvml_library.build(tmp_path / "library", without=lacking)
    machine = Machine(library, tmp_path / "machine.txt", gpus=2)
    found = inventory(machine)
    assert found["problems"] == []
    first, second, _ = found["devices"]
    assert (first["name"], first["free_bytes"]) == ("unknown GPU", FREE_BYTES)
    assert (second["id"], second["processes"]) == (uuid(1), None)
    assert found["driver_version"] is None
    assert answer(machine, f"devices.memory_of({uuid(1)!r}).free_bytes") == FREE_BYTES


@pytest.mark.parametrize("code", [4, 999])
def test_mig_devices_that_cannot_be_read_are_not_called_missing(
    machine: Machine, code: int
) -> None:
    machine.add_mig(2, 2)
    machine.change({"fail.nvmlDeviceGetMigDeviceHandleByIndex": code})
    (problem,) = inventory(machine)["problems"]
    assert "it is in MIG mode: only its MIG devices can be used, but that" in problem
    assert f"[NVML error {code}]" in problem


def test_mig_devices_are_found_by_a_driver_that_does_not_count_them(
    machine: Machine,
) -> None:
    machine.add_mig(2, 2)
    machine.change({"fail.nvmlDeviceGetMaxMigDeviceCount": 3})
    assert mig_uuid(2, 1) in by_id(inventory(machine))


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


@pytest.mark.parametrize(
    "function",
    ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo_v2"],
)
def test_a_hanging_driver_does_not_hang_us(machine: Machine, function: str) -> None:
    machine.change({f"hang.{function}": 120})
    value = answer(
        machine,
        "[devices.discover({}, timeout_s=0.5).problems[0] for _ in range(2)]"
        f" + [devices.memory_of({uuid(0)!r}).reason]"
        f" + [devices.wait_until_free({uuid(0)!r}, 1, timeout_s=300).memory.reason]",
    )
    assert value[0].startswith("the NVIDIA driver did not answer within 0.5 s")
    assert set(value[1:]) == {"the NVIDIA driver still hangs in an earlier call"}


@pytest.mark.parametrize(
    ("gone", "back", "words"),
    [
        ({"fail.nvmlDeviceGetHandleByUUID.1": 28}, None, "the GPU is not reachable"),
        ({"gpus": 1}, 8, "it is not there any more"),
    ],
)
def test_a_device_vanishes_and_comes_back_in_mid_run(
    machine: Machine, gone: dict[str, int], back: int | None, words: str
) -> None:
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
        machine.change(gone)
        told = ask()
        assert "Unreadable(reason='GPU-00000001" in told
        assert words in told
        machine.change({**dict.fromkeys(gone, back), "1.used": GIB})
        assert f"free_bytes={FREE_BYTES - GIB}" in ask()
        process.stdin.close()
        assert process.wait(timeout=20) == 0
