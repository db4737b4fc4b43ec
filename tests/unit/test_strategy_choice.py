"""Which strategy is taken, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core.errors import InfeasiblePlanError
from oomrun.core.spec import IN_WORKERS
from oomrun.core.strategy import Situation, choose
from oomrun.core.topology import Device, NvLink


def gpus(count: int, kind: str = "gpu") -> list[Device]:
    return [Device(id=f"GPU-{n}", kind=kind, name="") for n in range(count)]  # type: ignore[arg-type]


def cpus(count: int) -> list[Device]:
    return [Device(id=f"cpu:{n}", kind="cpu", name="") for n in range(count)]


def links(count: int) -> list[NvLink]:
    return [
        NvLink(first=f"GPU-{a}", second=f"GPU-{b}", links=1)
        for a in range(count)
        for b in range(a)
    ]


ONE, TWO = Situation(devices=gpus(1)), Situation(devices=gpus(2))
LINKED = Situation(devices=gpus(4), nvlinks=links(4))
CPUS = Situation(devices=cpus(2))
MIGS = Situation(devices=gpus(2, "mig"))


@pytest.mark.parametrize(
    ("situation", "strategy", "why"),
    [
        (ONE, "single", "there is one device to train on, GPU-0"),
        (replace(ONE, horovod=True), "single", "one device"),
        (replace(TWO, command=True), "single", "a command starts its own workers"),
        (TWO, "mirrored", "2 devices of one host"),
        (TWO, "mirrored", "not all joined by NVLink"),
        (replace(TWO, horovod=True), "mirrored", "one process"),
        (LINKED, "mirrored", "4 devices of one host, joined by NVLink"),
        (replace(LINKED, nvlinks=links(4)[1:]), "mirrored", "not all joined by NVLink"),
        (CPUS, "mirrored", "2 devices in one process"),
        (replace(CPUS, horovod=True), "mirrored", "in one process"),
        (replace(CPUS, own_limits=True), "mirrored", "in one process"),
        (replace(CPUS, own_limits=True, horovod=True), "horovod", "a limit each"),
        (replace(MIGS, horovod=True), "horovod", "one MIG device only"),
        (replace(TWO, hosts=2, horovod=True), "horovod", "on 2 hosts"),
        (replace(TWO, hosts=2), "multi_worker_mirrored", "Horovod is not installed"),
    ],
)
def test_auto(situation: Situation, strategy: str, why: str) -> None:
    choice = choose("auto", situation)
    assert choice.strategy == strategy
    assert choice.reason.startswith("auto: ")
    assert why in choice.reason


@pytest.mark.parametrize(
    ("asked", "situation", "wrong", "nearest"),
    [
        # A server that is open to the network is nothing to start unasked.
        ("auto", MIGS, "take orders", "strategy: multi_worker_mirrored"),
        ("mirrored", MIGS, "one MIG device only", "strategy: multi_worker_mirrored"),
        (
            "mirrored",
            replace(TWO, hosts=2, horovod=True),
            "of one host",
            "strategy: horovod",
        ),
        ("mirrored", replace(TWO, command=True), "command", "strategy: single"),
        ("horovod", replace(TWO, command=True), "command", "strategy: single"),
        (
            "multi_worker_mirrored",
            replace(TWO, command=True),
            "command",
            "strategy: single",
        ),
    ],
)
def test_refused(asked: str, situation: Situation, wrong: str, nearest: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=wrong) as raised:
        choose(asked, situation)
    assert nearest in str(raised.value)


@pytest.mark.parametrize("asked", ["single", "mirrored", *IN_WORKERS])
def test_what_the_job_file_asks_for_is_taken(asked: str) -> None:
    choice = choose(asked, TWO)
    assert choice.strategy == asked
    assert choice.reason.startswith("the job file asks for it: ")


@given(
    count=st.integers(1, 9),
    kind=st.sampled_from(["cpu", "gpu", "mig"]),
    hosts=st.integers(1, 3),
    horovod=st.booleans(),
    command=st.booleans(),
    own_limits=st.booleans(),
)
def test_auto_never_takes_what_it_would_refuse(
    count: int, kind: str, hosts: int, horovod: bool, command: bool, own_limits: bool
) -> None:
    situation = Situation(
        devices=gpus(count, kind),
        hosts=hosts,
        horovod=horovod,
        command=command,
        own_limits=own_limits,
    )
    open_to_all = kind == "mig" and hosts == 1 and count > 1 and not horovod
    if open_to_all and not command:
        with pytest.raises(InfeasiblePlanError, match="take orders"):
            choose("auto", situation)
        return
    choice = choose("auto", situation)
    assert choice.strategy != "multi_worker_mirrored" or hosts > 1
    assert choose(choice.strategy, situation).strategy == choice.strategy
    assert horovod or choice.strategy != "horovod"
    assert choice.strategy != "single" or command or count == 1
