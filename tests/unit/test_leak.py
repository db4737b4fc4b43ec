"""Leaks: what a forecast says, and what it is made from."""

from __future__ import annotations

import pytest

from oomrun.core.leak import Forecast, Growth

MB = 10**6


def _grown(sizes: list[float], stride: int = 1) -> Growth:
    growth = Growth()
    for number, size in enumerate(sizes):
        growth = growth.after(number * stride, int(size))
    return growth


def _line(count: int, per_step: float, begin: float = 100 * MB) -> list[float]:
    return [begin + per_step * number for number in range(count)]


def _forecast(sizes: list[float], budget: float, stride: int = 1) -> Forecast:
    found = _grown(sizes, stride).forecast(int(budget))
    assert found is not None
    return found


def test_nothing_is_said_of_nothing() -> None:
    assert Growth().forecast(100) is None
    assert _grown(_line(11, MB)).forecast(200 * MB) is None
    assert _grown(_line(100, 0)).forecast(200 * MB) is None
    assert _grown(_line(100, -MB)).forecast(200 * MB) is None


def test_a_line_is_forecast_exactly() -> None:
    found = _forecast(_line(66, MB), 200 * MB)
    assert found.bytes_per_step == found.low_bytes_per_step == MB
    assert found.steps_left == found.soonest_steps_left == 35
    assert found.confident


def test_the_growth_is_that_of_a_step_not_of_a_sample() -> None:
    found = _forecast(_line(61, MB), 200 * MB, stride=50)
    assert found.bytes_per_step == MB / 50
    assert found.steps_left == 40 * 50


def test_growth_is_told_before_it_is_called_a_leak() -> None:
    found = _forecast(_line(30, MB), 200 * MB)
    assert not found.confident
    assert found.steps_left == 71


def test_the_interval_holds_the_growth_where_memory_goes_up_and_down() -> None:
    sizes = [
        size + (7 * number % 5) * MB for number, size in enumerate(_line(80, MB / 2))
    ]
    found = _forecast(sizes, 140 * MB)
    assert found.low_bytes_per_step < MB / 2 < found.high_bytes_per_step
    assert found.soonest_steps_left <= found.steps_left
    assert found.confident


def test_what_lies_above_the_line_is_counted_as_used() -> None:
    plain, saw = _line(64, MB / 2), _line(64, MB / 2)
    saw = [size + 10 * MB * (number % 2) for number, size in enumerate(saw)]
    difference = (
        _forecast(plain, 150 * MB).steps_left - _forecast(saw, 150 * MB).steps_left
    )
    assert 18 <= difference <= 22


def test_at_the_budget_nothing_is_left() -> None:
    found = _forecast(_line(61, MB), 150 * MB)
    assert (found.steps_left, found.soonest_steps_left) == (0, 0)
    assert found.confident


@pytest.mark.parametrize("jumps", [[30], [20, 40], [0, 1, 2]])
def test_jumps_are_no_leak_however_high(jumps: list[int]) -> None:
    sizes = [
        100 * MB + 90 * MB * sum(n > jump for jump in jumps) / len(jumps)
        for n in range(60)
    ]
    growth = Growth()
    for number, size in enumerate(sizes):
        growth = growth.after(number, int(size))
        found = growth.forecast(200 * MB)
        assert found is None or not found.confident


def test_growth_that_slows_down_and_will_end_is_no_leak() -> None:
    sizes = [100 * MB + 70 * MB * (1 - 0.9**number) for number in range(60)]
    growth = Growth()
    for number, size in enumerate(sizes):
        growth = growth.after(number, int(size))
        found = growth.forecast(200 * MB)
        assert found is None or not found.confident


def test_the_same_step_again_is_dropped_and_an_earlier_one_begins_anew() -> None:
    growth = _grown(_line(61, MB))
    assert growth.after(60, 999 * MB) == growth
    assert growth.after(3, 5) == Growth().after(3, 5)


def test_a_leak_that_begins_late_is_seen() -> None:
    sizes = [100.0 * MB] * 3000 + _line(30, MB)
    assert _forecast(sizes, 140 * MB).confident


def test_the_memory_of_a_long_run_is_bounded() -> None:
    growth = Growth()
    for number in range(70_000):
        growth = growth.after(number, 100 * MB + number)
    points = sum(len(window.points) for window in growth._windows)
    assert points <= 32 * 17
    found = growth.forecast(100 * MB + 100_000)
    assert found is not None
    assert found.confident
    assert found.steps_left == pytest.approx(30_000, abs=10)
