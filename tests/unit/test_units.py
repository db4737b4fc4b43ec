from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomrun.core import units


def refusal(parse: Callable[[str], float], text: str) -> str:
    """The hint with which the text is refused."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{text!r} was taken")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0B", 0),
        ("1b", 1),
        ("512 MB", 512 * 10**6),
        ("600MiB", 600 * 2**20),
        ("600mib", 600 * 2**20),
        ("20GiB", 20 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.1KiB", 102),
        ("2TiB", 2 * 2**40),
        ("1.0000000001GB", 1_000_000_000),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", ""),
        ("much", ""),
        ("-5MiB", ""),
        ("1,5GB", ""),
        ("1e3MB", ""),
        (" 5MB", ""),
        ("5  MB", ""),
        ("٥MB", ""),
        ("20", "add a unit: 20MiB or 20GiB"),
        ("20G", "did you mean 20GiB?"),
        ("20Gi", "did you mean 20GiB?"),
        ("1.5m", "did you mean 1.5MiB?"),
        ("20PB", "units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("9" * 400 + "MB", "too many digits"),
    ],
)
def test_not_bytes(text: str, hint: str) -> None:
    assert refusal(units.parse_bytes, text) == hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (600 * 2**20, "600MiB"),
        (1536 * 2**20, "1.5GiB"),
        (1500 * 10**6, "1.4GiB"),
        (-(2**20), "-1MiB"),
        (3 * 2**40, "3TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert units.format_bytes(count) == text


@given(st.integers(0, 2**50))
def test_bytes_survive_formatting(count: int) -> None:
    assert units.parse_bytes(units.format_bytes(count)) == pytest.approx(
        count, rel=0.0051
    )


@given(st.integers(1, 1023), st.sampled_from([2**10, 2**20, 2**30, 2**40]))
def test_whole_units_survive_exactly(number: int, unit: int) -> None:
    assert units.parse_bytes(units.format_bytes(number * unit)) == number * unit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10min", 600),
        ("10 min", 600),
        ("2h", 7200),
        ("1h30min", 5400),
        ("1h 30min", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("1d", 86_400),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", ""),
        ("soon", ""),
        ("10", "add a unit: 10s or 10min"),
        ("10m", "did you mean 10min?"),
        ("3 hours", "did you mean 3h?"),
        ("3 weeks", "units: ms, s, min, h, d"),
        ("1h later", ""),
        ("-1s", ""),
        ("9" * 30 + "s", "too many digits"),
    ],
)
def test_not_durations(text: str, hint: str) -> None:
    assert refusal(units.parse_duration, text) == hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (2.5, "2.5s"),
        (59.99, "1min"),
        (60, "1min"),
        (5400, "1h30min"),
        (90_061, "1d1h1min1s"),
        (-5, "-5s"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@given(st.floats(0.001, 10**7))
def test_durations_survive_formatting(seconds: float) -> None:
    again = units.parse_duration(units.format_duration(seconds))
    assert again == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("text", "fraction"), [("8%", 0.08), ("0%", 0), ("100 %", 1), ("12.5%", 0.125)]
)
def test_fractions(text: str, fraction: float) -> None:
    assert units.parse_fraction(text) == fraction
    assert units.parse_fraction(units.format_fraction(fraction)) == fraction


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", ""),
        ("%", ""),
        ("x%", ""),
        ("8", ""),
        ("0.08", "did you mean 8%?"),
        ("120%", "at most 100%"),
        ("-1%", ""),
        ("8%%", ""),
    ],
)
def test_not_fractions(text: str, hint: str) -> None:
    assert refusal(units.parse_fraction, text) == hint
