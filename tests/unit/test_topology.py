"""Inventories as values: CUDA_VISIBLE_DEVICES, the job's choice, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from oomrun.core.topology import (
    Device,
    Host,
    Inventory,
    NvLink,
    SelectionError,
    fits_one_process,
    numbered,
    select,
    to_json,
)
from oomrun.core.visibility import visible

HOST = Host(memory_total_bytes=64 << 30, memory_available_bytes=60 << 30)
CPU = Device(id="cpu:0", kind="cpu", name="CPU")
A, B, C, D = (
    Device(
        id=f"GPU-{letter * 4}-1111",
        kind="gpu",
        name="H100",
        index=n,
        pci_bus_id=f"00000000:0{n + 1}:00.0",
    )
    for n, letter in enumerate("abcd")
)
MIG_GPU = replace(D, mig_enabled=True, problem="it is in MIG mode")
MIG_1, MIG_2 = (
    Device(
        id=f"MIG-{n}{n}-dddd",
        kind="mig",
        name="H100 MIG 1g",
        index=3,
        parent=D.id,
        free_bytes=n << 30,
        gpu_instance_id=n,
        compute_instance_id=0,
    )
    for n in (1, 2)
)
LOST = replace(B, problem="the GPU is lost")
FOUR = Inventory(devices=(A, B, C, D, CPU), host=HOST)
WITH_MIG = Inventory(devices=(A, B, C, MIG_GPU, MIG_1, MIG_2, CPU), host=HOST)
NO_GPU = Inventory(devices=(CPU,), host=HOST)


def gpus(inventory: Inventory) -> list[Device]:
    assert inventory.devices[-1] == CPU, "the CPU stays, and comes last"
    return list(inventory.devices[:-1])


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (None, [A, B, C, D], None),
        ("0,1,2,3", [A, B, C, D], None),
        ("2,0", [C, A], None),
        (" 1 , 3", [B, D], None),
        ("+1", [B], None),
        # CUDA reads numbers as strtol does.
        ("1gpu,2x", [B, C], None),
        # All ways to say "none".
        ("", [], "hides every GPU"),
        ("-1", [], "hides every GPU"),
        ("none", [], "hides every GPU"),
        ("NoDevFiles", [], "hides every GPU"),
        (",0", [], "hides every GPU"),
        # The first entry that is no device ends the list.
        ("0,2,-1,1", [A, C], 'has "-1"'),
        ("0,,1", [A], 'has ""'),
        ("0,9,1", [A], "names 9, which is not on this machine"),
        ("9,0", [], "names 9"),
        ("0,GPU-bbbb", [A], 'has "GPU-bbbb"'),
        # A repeat hides all, by whatever spelling.
        ("0,1,0", [], "names GPU-aaaa-1111 twice"),
        # … but not behind the entry that ends the list (seen with driver 580).
        ("0,9,0", [A], "names 9, which is not on this machine"),
        ("1,+1", [], "twice"),
        ("GPU-aaaa,GPU-aaaa", [], "twice"),
        ("GPU-aaaa,GPU-aaaa-1111", [], "names GPU-aaaa-1111 twice"),
        # UUIDs, whole or cut short.
        ("GPU-cccc-1111,GPU-aaaa-1111", [C, A], None),
        ("GPU-d,GPU-b", [D, B], None),
        ("GPU-a,GPU-e,GPU-b", [A], "names GPU-e, which is not on this machine"),
        ("GPU-,GPU-a", [], "names GPU-, which is not on this machine"),
        # Case, and text behind the UUID, do not matter (seen with driver 580).
        ("GPU-AAAA-1111", [A], None),
        ("GPU-aaaa-1111x", [A], None),
        ("GPU-aaaa-1111 ", [A], None),
        ("GPU-a,1", [A], 'has "1"'),
        ("GPU-a,MIG-11", [A], 'has "MIG-11"'),
        ("gpu-aaaa", [], "hides every GPU"),
        ("MIG-11", [], "not on this machine"),
    ],
)
def test_visible_devices_in_all_its_forms__pitfall_21(
    text: str | None, expected: list[Device], note: str | None
) -> None:
    seen = visible(FOUR, text)
    assert gpus(seen) == expected
    assert len(seen.problems) == (note is not None)
    assert note is None or note in seen.problems[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [A, B, C, MIG_GPU, MIG_1, MIG_2]),
        ("MIG-22-dddd", [MIG_2]),
        ("MIG-2,MIG-1", [MIG_2, MIG_1]),
        ("MIG-1,GPU-a", [MIG_1]),
        (f"MIG-{D.id}/2/0", [MIG_2]),
        (f"MIG-{D.id}/3/0", []),
        # A GPU in MIG mode brings its MIG devices, which do not count as numbers.
        ("3,0", [MIG_GPU, MIG_1, MIG_2, A]),
        ("GPU-d", [MIG_GPU, MIG_1, MIG_2]),
        ("4", []),
    ],
)
def test_visible_mig_devices__pitfall_21(
    text: str | None, expected: list[Device]
) -> None:
    assert gpus(visible(WITH_MIG, text)) == expected


def test_numbers_follow_the_pci_bus_and_not_nvml__pitfall_21() -> None:
    swapped = (replace(A, index=1), replace(B, index=0))
    inventory = Inventory(devices=(swapped[1], swapped[0], CPU), host=HOST)
    assert gpus(visible(inventory, "0")) == [swapped[0]]


def test_without_gpus_the_variable_is_not_worth_a_word() -> None:
    assert visible(NO_GPU, "0,1") == NO_GPU


def test_links_of_hidden_gpus_are_hidden() -> None:
    links = (NvLink(first=A.id, second=B.id, links=4),)
    inventory = replace(FOUR, nvlinks=links)
    assert visible(inventory, "1,0").nvlinks == links
    assert visible(inventory, "1,2").nvlinks == ()


@pytest.mark.parametrize(
    ("inventory", "wanted", "expected"),
    [
        (FOUR, "auto", (A, B, C, D)),
        (FOUR, "gpu", (A, B, C, D)),
        (FOUR, "cpu", (CPU,)),
        (NO_GPU, "auto", (CPU,)),
        (Inventory(devices=(A, LOST, CPU), host=HOST), "auto", (A,)),
        (Inventory(devices=(LOST, CPU), host=HOST), "auto", (CPU,)),
        (WITH_MIG, "auto", (A, B, C)),
        # One MIG device, the one with most free memory, when there is nothing else.
        (visible(WITH_MIG, "3"), "auto", (MIG_2,)),
        (FOUR, [0, 2], (A, C)),
        (FOUR, [2, 0], (C, A)),
        (FOUR, ["GPU-d", 0], (D, A)),
        (FOUR, ["cpu:0"], (CPU,)),
        (WITH_MIG, ["MIG-2", "MIG-1"], (MIG_2, MIG_1)),
        # Numbers count what is visible, as in any CUDA program.
        (visible(FOUR, "3,1"), [1], (B,)),
        (visible(WITH_MIG, "MIG-2,MIG-1"), [1], (MIG_1,)),
    ],
)
def test_select(
    inventory: Inventory, wanted: str | Sequence[int | str], expected: object
) -> None:
    assert select(inventory, wanted) == expected


@pytest.mark.parametrize(
    ("inventory", "wanted", "message"),
    [
        (NO_GPU, "gpu", "there is no usable GPU; there is: cpu:0"),
        (Inventory(devices=(LOST, CPU), host=HOST), "gpu", "no usable GPU"),
        (replace(NO_GPU, problems=("no driver",)), "gpu", "no usable GPU (no driver)"),
        (Inventory(devices=(), host=HOST), "auto", "there is: no device"),
        (FOUR, "tpu", "'tpu' is not auto, gpu, cpu or a list"),
        (FOUR, [4], "device 4 does not exist; there is: 0 = GPU-aaaa-1111, 1 = "),
        (FOUR, [-1], "device -1 does not exist"),
        (FOUR, [""], "does not exist"),
        (FOUR, ["GPU-e"], "device GPU-e does not exist"),
        (FOUR, ["GPU-"], "device GPU- fits 4 devices"),
        (FOUR, [0, "GPU-a"], "GPU-aaaa-1111 is named twice"),
        (FOUR, [], "the list of devices is empty"),
        (FOUR, [0, "cpu:0"], "cannot mix CPU and GPU"),
        (Inventory(devices=(LOST, CPU), host=HOST), [0], "the GPU is lost"),
        (WITH_MIG, [3], "it is in MIG mode"),
    ],
)
def test_select_says_what_exists(
    inventory: Inventory, wanted: str | Sequence[int | str], message: str
) -> None:
    with pytest.raises(SelectionError) as raised:
        select(inventory, wanted)
    assert message in str(raised.value)


def test_an_exact_id_wins_over_a_longer_one_with_the_same_beginning() -> None:
    one, ten = (replace(A, id=f"gpu:{n}", index=n) for n in (1, 10))
    assert select(Inventory(devices=(ten, one), host=HOST), ["gpu:1"]) == (one,)


def test_one_process_sees_one_mig_device() -> None:
    assert fits_one_process((A, B))
    assert fits_one_process((MIG_1,))
    assert not fits_one_process((MIG_1, MIG_2))
    assert not fits_one_process((A, MIG_1))


def test_json_is_what_comes_back_from_a_file() -> None:
    document = to_json(WITH_MIG)
    assert json.loads(json.dumps(document)) == document
    assert [device["number"] for device in document["devices"]] == [
        *(0, 1, 2, 3),
        *(None, None, None),
    ]
    assert len(numbered(WITH_MIG)) == 4


@pytest.mark.parametrize(
    ("limit", "free", "expected"),
    [(None, None, (64, 60)), (16, 9, (16, 9)), (512, 500, (64, 60))],
)
def test_the_tighter_of_cgroup_and_machine_holds(
    limit: int | None, free: int | None, expected: tuple[int, int]
) -> None:
    host = Host(
        memory_total_bytes=64,
        memory_available_bytes=60,
        cgroup_limit_bytes=limit,
        cgroup_free_bytes=free,
    )
    assert (host.limit_bytes, host.free_bytes) == expected
