"""Checks oomrun's inventory against a real NVIDIA driver, and prints what it saw.

    PYTHONPATH=nvidia_ml_py-….whl python tests/gpu/check.py

Needs a GPU, its driver, pynvml (a wheel on the path will do), and nothing else: no
TensorFlow, no CUDA toolkit, no installed oomrun. Prints one JSON document; its "checks"
say what was compared and "failed" what did not hold. Exit code 0 when nothing failed.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launcher"))

from oomrun import devices
from oomrun.cli.devices_command import render
from oomrun.core.topology import Device, Inventory, Memory, to_json
from oomrun.core.visibility import visible

GIB = 1 << 30
MIB = 1 << 20
HELD_BYTES = 4 * GIB
# nvidia-smi rounds to MiB, and other processes may come and go between two readings.
SLACK_BYTES = 64 * MIB
QUERY = "uuid,memory.total,memory.used,memory.free,memory.reserved"


class Checks:
    """What was compared, and with what result."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def add(self, name: str, holds: bool, **seen: Any) -> None:
        """Records one comparison."""
        self.results.append({"name": name, "holds": bool(holds), **seen})

    @property
    def failed(self) -> list[str]:
        """The names of those that did not hold."""
        return [result["name"] for result in self.results if not result["holds"]]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What the function returns, and how many seconds it took."""
    started = time.perf_counter()
    value = function()
    return value, round(time.perf_counter() - started, 4)


def usable_gpus(inventory: Inventory) -> list[Device]:
    """The GPUs that a job could run on."""
    return [d for d in inventory.devices if d.kind == "gpu" and d.usable]


# --- nvidia-smi ---------------------------------------------------------------------


def nvidia_smi() -> dict[str, dict[str, int]]:
    """What nvidia-smi says of each GPU's memory, in bytes by UUID."""
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    names = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes")
    return {
        row[0]: dict(zip(names, (int(cell) * MIB for cell in row[1:]), strict=True))
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
    }


def check_against_nvidia_smi(inventory: Inventory, checks: Checks) -> None:
    """The same GPUs with the same memory, but for rounding and neighbours."""
    told = nvidia_smi()
    gpus = {d.id: d for d in inventory.devices if d.kind == "gpu"}
    checks.add("nvidia-smi: same UUIDs", set(told) == set(gpus), nvidia_smi=list(told))
    for name in set(told) & set(gpus):
        for fact, expected in told[name].items():
            seen = getattr(gpus[name], fact)
            exact = fact in ("total_bytes", "reserved_bytes")
            slack = MIB if exact else SLACK_BYTES
            checks.add(
                f"nvidia-smi: {fact} of {name}",
                seen is not None and abs(seen - expected) <= slack,
                oomrun=seen,
                nvidia_smi=expected,
            )


# --- the CUDA driver, without a toolkit ---------------------------------------------


class Cuda:
    """The few calls of libcuda that are needed here."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver.

        Raises:
            RuntimeError: It did not return success.
        """
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")


def list_devices() -> None:
    """In a child: prints the UUIDs that CUDA shows to this process."""
    cuda = Cuda()
    names: list[str] = []
    with contextlib.suppress(RuntimeError):  # no device is an error of cuInit
        cuda.call("cuInit", 0)
        count = ctypes.c_int()
        cuda.call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            cuda.call("cuDeviceGet", ctypes.byref(device), ordinal)
            cuda.call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
            names.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    print(json.dumps(names))


def hold(count: int) -> None:
    """In a child: takes device memory, says so, and keeps it until it is killed."""
    cuda = Cuda()
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    cuda.call("cuInit", 0)
    cuda.call("cuDeviceGet", ctypes.byref(device), 0)
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda.call("cuCtxSetCurrent", context)
    cuda.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(count))
    print("holding", flush=True)
    sys.stdin.read()


def in_child(visible_devices: str | None) -> dict[str, str]:
    """The environment of a child with CUDA_VISIBLE_DEVICES set, or not."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices
    return environment


def forms(gpus: list[Device]) -> list[str | None]:
    """Ways to write CUDA_VISIBLE_DEVICES for these GPUs, good and bad."""
    first = gpus[0].id
    last = len(gpus) - 1
    return [
        *(None, "", " ", "-1", "none", "0", " 0", "+0", "0 ", "00", "0x0", "0gpu"),
        *("0,-1", "-1,0", "0,0", "0,+0", "0,99", "99,0", "0,,0", ",0", "0,99,0"),
        *(f"{last},0", ",".join(str(n) for n in range(last, -1, -1))),
        *(first, first[:8], first[:12], "GPU-", first.lower(), first.upper()),
        *(f"{first},{first}", f"{first},{first[:12]}", f"{first},GPU-zzz"),
        *(f"GPU-zzz,{first}", f"{first},0", f"0,{first}", f"{first},99"),
        *(f" {first}", f"{first} ", f"{first}, GPU-zzz", f"{first}x", "MIG-zzz"),
        ",".join(gpu.id for gpu in reversed(gpus)),
        ", ".join(gpu.id for gpu in reversed(gpus)),
    ]


def check_visible_devices(inventory: Inventory, checks: Checks) -> None:
    """Our reading of CUDA_VISIBLE_DEVICES against what CUDA makes of it."""
    for text in dict.fromkeys(forms(usable_gpus(inventory))):
        done = subprocess.run(
            [sys.executable, __file__, "--list-devices"],
            env=in_child(text),
            capture_output=True,
            text=True,
            timeout=60,
        )
        cuda = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-300:]
        ours = [d.id for d in usable_gpus(visible(inventory, text))]
        shown = "unset" if text is None else f'"{text}"'
        checks.add(f"CUDA_VISIBLE_DEVICES {shown}", ours == cuda, ours=ours, cuda=cuda)


# --- another process's memory -------------------------------------------------------


@contextlib.contextmanager
def holder(device_id: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds HELD_BYTES of the device; it is dead afterwards."""
    with subprocess.Popen(
        [sys.executable, __file__, "--hold", str(HELD_BYTES)],
        env=in_child(device_id),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "holding\n":
                raise RuntimeError("the child could not take device memory")
            yield process
        finally:
            process.kill()


def check_neighbour(device_id: str, checks: Checks) -> None:
    """A process's memory shows up as another's, and is back soon after its death."""
    before = devices.memory_of(device_id)
    assert isinstance(before, Memory), before
    wanted = before.free_bytes - SLACK_BYTES
    with holder(device_id) as process:
        during = next(d for d in devices.discover({}).devices if d.id == device_id)
        taken = before.free_bytes - (during.free_bytes or 0)
        checks.add("neighbour: free memory fell", taken >= HELD_BYTES, taken=taken)
        risen = (during.used_by_others_bytes or 0) - before.used_bytes
        checks.add("neighbour: others' use rose", risen >= HELD_BYTES, risen=risen)
        waited = devices.wait_until_free(device_id, wanted, timeout_s=1.0)
        checks.add(
            "neighbour: waiting gives up in time",
            not waited.reached and waited.waited_s < 5,
            waited_s=round(waited.waited_s, 3),
        )
        listed = during.processes
        check_own(device_id, process.pid, listed is not None, checks)
        process.kill()
        waited = devices.wait_until_free(device_id, wanted, timeout_s=30.0)
    memory = waited.memory
    checks.add(
        "neighbour: its memory is back after SIGKILL",
        waited.reached,
        waited_s=round(waited.waited_s, 3),
        free_before=before.free_bytes,
        free_after=memory.free_bytes if isinstance(memory, Memory) else memory.reason,
    )


def check_own(device_id: str, pid: int, listed: bool, checks: Checks) -> None:
    """The same process called our own; in a container NVML may not know its pid."""
    inventory = devices.discover({}, own_pids=frozenset({pid}))
    device = next(d for d in inventory.devices if d.id == device_id)
    entry = next((p for p in device.processes or () if p.pid == pid), None)
    checks.add(
        "neighbour: its pid is listed, or pids are another namespace's",
        listed,
        pid_found=entry is not None,
        process=None if entry is None else [entry.name, entry.used_bytes],
        used_by_others=device.used_by_others_bytes,
        all_pids=[p.pid for p in device.processes or ()],
    )


def main() -> int:
    """Runs all checks; 0 when all hold, 1 when not, 2 without a usable GPU."""
    checks = Checks()
    inventory, cold_s = timed(lambda: devices.discover({}))
    gpus = usable_gpus(inventory)
    report: dict[str, Any] = {"inventory": to_json(inventory)}
    if not gpus:
        print(json.dumps(report, indent=1))
        return 2
    one = gpus[0].id
    with devices.held_open(30.0):
        _, held_discover_s = timed(lambda: devices.discover({}))
        readings = [timed(lambda: devices.memory_of(one))[1] for _ in range(20)]
    report["seconds"] = {
        "discover, first": cold_s,
        "discover, again": timed(lambda: devices.discover({}))[1],
        "discover, held open": held_discover_s,
        "memory_of": timed(lambda: devices.memory_of(one))[1],
        "memory_of, held open, median of 20": statistics.median(readings),
    }
    check_against_nvidia_smi(devices.discover({}), checks)
    check_neighbour(one, checks)
    check_visible_devices(inventory, checks)
    report["table"] = render(inventory).splitlines()
    report["checks"] = checks.results
    report["failed"] = checks.failed
    print(json.dumps(report, indent=1))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--list-devices"]:
        list_devices()
    elif sys.argv[1:2] == ["--hold"]:
        hold(int(sys.argv[2]))
    else:
        sys.exit(main())
