"""The supervisor's answers to workers, from what earlier runs have stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oomrun.core import events as ev
from oomrun.core.plan import DevicePlan, Plan
from oomrun.core.profile import Environment, full_key
from oomrun.core.spec import JobSpec, Script
from oomrun.core.state import JobState
from oomrun.core.topology import Device, Host, Inventory
from oomrun.profiles import Profiles
from oomrun.remembering import Remembering, environment_of

LIMIT = 100 * 2**20


def started(key: str | None, fit: int = 1) -> ev.FitStarted:
    return ev.FitStarted(
        at=1.0, attempt=1, fit=fit, epochs=1, initial_epoch=0, global_batch_size=64,
        micro_batch_size=None, steps_per_epoch=2, profile_key=key,
    )  # fmt: skip


def state(**fields: Any) -> JobState:
    plan = {"devices": [{"id": "cpu:0", "limit_bytes": LIMIT}]}
    return replace(JobState(plan=plan), **fields)


def test_nothing_is_remembered_of_a_new_model(tmp_path: Path) -> None:
    answer = Remembering(Profiles(tmp_path)).answer(state(), started("a"))
    assert answer == {
        "do": "remembered",
        "key": "a",
        "measured": [],
        "recorded": [],
        "failed": None,
    }


def test_what_one_run_keeps_another_is_told(tmp_path: Path) -> None:
    known = state(
        profile_key="a", measured={8: 60, 16: 90}, recorded={16: 95},
        micro_batch_failed=32, limit_when_failed_bytes=LIMIT, step=7,
    )  # fmt: skip
    Remembering(Profiles(tmp_path)).keep(known)
    answer = Remembering(Profiles(tmp_path)).answer(state(), started("a"))
    assert answer is not None
    assert answer["measured"] == [[8, 60], [16, 90]]
    assert answer["recorded"] == [[16, 95]]
    assert answer["failed"] == 32
    other = Remembering(Profiles(tmp_path)).answer(state(), started("b"))
    assert other is not None
    assert other["measured"] == []


def test_what_failed_under_a_lower_limit_says_nothing(tmp_path: Path) -> None:
    known = state(
        profile_key="a", measured={8: 60}, micro_batch_failed=32,
        limit_when_failed_bytes=LIMIT // 2,
    )  # fmt: skip
    Remembering(Profiles(tmp_path)).keep(known)
    answer = Remembering(Profiles(tmp_path)).answer(state(), started("a"))
    assert answer is not None
    assert answer["failed"] is None


def test_a_script_with_two_models_keeps_both(tmp_path: Path) -> None:
    remembering = Remembering(Profiles(tmp_path))
    first = state(profile_key="a", measured={8: 60})
    remembering.answer(first, started("b", fit=2))
    again = Remembering(Profiles(tmp_path)).answer(state(), started("a"))
    assert again is not None
    assert again["measured"] == [[8, 60]]


def test_only_a_fit_with_a_key_is_answered(tmp_path: Path) -> None:
    remembering = Remembering(Profiles(tmp_path))
    assert remembering.answer(state(), started(None)) is None
    noted = ev.Noted(at=1.0, attempt=1, code="x", text="y")
    assert remembering.answer(state(), noted) is None
    remembering.keep(state(measured={8: 60}))
    assert not list(tmp_path.iterdir())


def test_another_model_begins_with_nothing_known() -> None:
    known = state(
        profile_key="a", fit=1, measured={8: 60}, micro_batch_failed=32,
        micro_batch_limit=16,
    )  # fmt: skip
    other = known.after(started("b", fit=2))
    assert other.measured == {}
    assert (other.micro_batch_failed, other.micro_batch_limit) == (None, None)
    same = known.after(started("a", fit=2))
    assert same.measured == {8: 60}
    assert (same.micro_batch_failed, same.micro_batch_limit) == (32, 16)


# --- several devices ------------------------------------------------------------------


def in_group(**fields: Any) -> JobState:
    devices = [
        {"id": "cpu:0", "limit_bytes": LIMIT},
        {"id": "cpu:1", "limit_bytes": LIMIT // 2},
    ]
    return replace(JobState(plan={"strategy": "horovod", "devices": devices}), **fields)


def tried(rank: int, peaks: dict[int, int | None]) -> ev.SizesTried:
    return ev.SizesTried(
        at=1.0, attempt=1, rank=rank, profile_key="a", sizes=tuple(peaks),
        peaks=tuple(peaks.values()),
    )  # fmt: skip


def wanted(rank: int) -> ev.SizesWanted:
    return ev.SizesWanted(at=1.0, attempt=1, rank=rank, profile_key="a")


def test_each_worker_of_a_group_is_told_what_all_have_tried(tmp_path: Path) -> None:
    first = Remembering(Profiles(tmp_path))
    assert first.answer(in_group(), tried(0, {48: 90})) is None
    assert first.answer(in_group(), tried(1, {24: 60, 32: None})) is None
    later = Remembering(Profiles(tmp_path))
    told = later.answer(in_group(), wanted(1))
    assert told is not None
    assert (told["measured"], told["failed"]) == ([[24, 60], [48, 90]], 32)
    # What failed under the second one's limit says nothing of the first one's.
    told = later.answer(in_group(), started("a"))
    assert told is not None
    assert (told["measured"], told["failed"]) == ([[24, 60], [48, 90]], None)


def test_what_a_step_of_a_group_takes_is_not_what_a_trial_does(tmp_path: Path) -> None:
    mirrored = {"strategy": "mirrored", "devices": [{"id": "a"}, {"id": "b"}]}
    for plan in (in_group().plan, mirrored):
        known = JobState(plan=plan, profile_key="a", measured={8: 60})
        Remembering(Profiles(tmp_path)).keep(known)
    told = Remembering(Profiles(tmp_path)).answer(in_group(), wanted(0))
    assert told is not None
    assert told["measured"] == []


def test_another_world_has_another_key() -> None:
    spec = JobSpec(name="x", program=Script(path="t.py"))
    device = Device(id="cpu:0", kind="cpu", name="a")
    host = Host(memory_total_bytes=1, memory_available_bytes=1)
    machine = Inventory(devices=(device,), host=host)
    planned = DevicePlan(id="cpu:0", kind="cpu", limit_bytes=1, budget_bytes=1)
    plan = Plan(
        strategy="horovod", strategy_reason="", global_batch_size=None,
        memory_mode="limit", devices=(planned,),
    )  # fmt: skip

    def key(plan: Plan = plan, machine: Inventory = machine, replicas: int = 2) -> str:
        known = environment_of(spec, plan, machine, {}, replicas)
        known["versions"] |= {"tensorflow": "2", "keras": "3"}
        return full_key("model", Environment(**known, global_batch_size=96))

    other = replace(machine, devices=(replace(device, name="b"),))
    keys = {
        key(),
        key(replicas=3),
        key(replace(plan, strategy="mirrored")),
        key(machine=other),
    }
    assert len(keys) == 4
    assert key() == key()
