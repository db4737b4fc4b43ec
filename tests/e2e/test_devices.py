"""The real pynvml on a library of ours: eight GPUs, MIG, neighbours, NVLink."""

from __future__ import annotations

import pytest
from fake_machine import FREE_BYTES, answer, by_id, inventory

from nvml_library import GIB, RESERVED_BYTES, Machine, mig_uuid, uuid


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
