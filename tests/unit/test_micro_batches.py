"""Which size is trained with after one that ran out of memory, in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Engine
from oomrun.core import events as ev
from oomrun.worker.recovery import MicroBatches


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Engine, list[ev.Event]]]:
    """An engine, and what it has told at the end."""
    engine, events = Engine(folder), list[ev.Event]()
    yield engine, events
    events += engine.close()


def sizes_of(engine: Engine, **device: Any) -> MicroBatches:
    """Those of a worker whose only device is so."""
    launch = engine.session.launch
    (planned,) = launch.plan.devices
    plan = replace(launch.plan, devices=(replace(planned, **device),))
    return MicroBatches(replace(launch, plan=plan), engine._channel)


@pytest.mark.parametrize(
    ("tried", "ran", "failed", "then"),
    [
        ({}, (), 160, 80),  # half, where nothing is known
        ({73: 78, 140: 117}, (), 160, 140),  # what was tried, and is clearly less
        ({73: 78, 140: 117, 154: 118}, (), 160, 140),  # that one is too near to it
        ({73: 78, 140: 117, 160: 119}, (), 160, 140),  # it had been tried itself
        ({73: 78, 160: 119}, (), 160, 80),
        ({20: 40}, (), 160, 80),  # less than the half
        ({140: 117, 110: 130}, (), 160, 140),
        ({140: 125, 110: 100}, (), 160, 110),  # more than this device has
        ({}, (155,), 160, 155),  # it has trained steps
        ({140: 117}, (96,), 160, 140),
        ({1: 10}, (), 1, None),  # nothing is smaller
    ],
)
def test_it_is_the_largest_that_is_known_to_run(
    tried: dict[int, int],
    ran: tuple[int, ...],
    failed: int,
    then: int | None,
    tmp_path: Path,
) -> None:
    with running(tmp_path) as (engine, events):
        sizes = sizes_of(engine, limit_bytes=120)
        for size, peak in tried.items():
            sizes.note_peak(size, peak)
        for size in ran:
            sizes.ran(size)
        again = sizes.shrink(failed, 256, "gradients", "OOM", safe=True)
    assert again == (then is not None)
    assert sizes.size(256) == (then or 256)
    changed = [e for e in events if isinstance(e, ev.MicroBatchChanged)]
    assert [(e.old, e.new) for e in changed] == ([(failed, then)] if then else [])


def test_a_little_less_than_what_was_recorded_and_then_half(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        sizes = sizes_of(engine, limit_bytes=120)
        found = []
        sizes.note_failed(250)  # in a trial
        sizes.note_pool(256, 119)  # by its recorded allocations it has room
        for _ in range(4):
            failed = sizes.size(256)
            assert sizes.shrink(failed, 256, "gradients", "OOM", safe=True)
            found.append(sizes.size(256))
    assert found == [204, 102, 51, 25]


def test_what_training_has_tried_says_nothing_of_evaluation(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        sizes = sizes_of(engine, limit_bytes=120)
        sizes.note_peak(140, 100)
        assert sizes.shrink(160, 256, "evaluate", "OOM", safe=True)
    assert sizes.size(256, "evaluate") == 80
    assert sizes.size(256) == 256
