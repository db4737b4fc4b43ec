"""The supervisor's answers to workers, from what earlier runs have stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oomrun.core import events as ev
from oomrun.core.state import JobState
from oomrun.profiles import Profiles
from oomrun.remembering import Remembering

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
    assert answer == {"do": "remembered", "key": "a", "measured": [], "failed": None}


def test_what_one_run_keeps_another_is_told(tmp_path: Path) -> None:
    known = state(
        profile_key="a", measured={8: 60, 16: 90}, micro_batch_failed=32,
        limit_when_failed_bytes=LIMIT, step=7,
    )  # fmt: skip
    Remembering(Profiles(tmp_path)).keep(known)
    answer = Remembering(Profiles(tmp_path)).answer(state(), started("a"))
    assert answer is not None
    assert answer["measured"] == [[8, 60], [16, 90]]
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
