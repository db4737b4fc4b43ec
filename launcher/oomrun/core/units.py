"""Sizes, times and shares as people write them, and back.

Covers: ``600MiB``, ``1.5GB``, ``512 MB``; ``10min``, ``2h``, ``1h30min``; ``8%``.
Does not cover: bare numbers. A number without its unit is refused, since ``limit: 20``
has been taken for bytes, megabytes and gigabytes, each by somebody.

The patterns are exported because the JSON Schema of the job file states them too.
"""

import re

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
SIZE_PATTERN = rf"^{_NUMBER} ?(?:[kKmMgGtT][iI]?)?[bB]$"
DURATION_PATTERN = rf"^(?:{_NUMBER} ?(?:ms|s|min|h|d) ?)+$"
SHARE_PATTERN = r"^(?:100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?) ?%$"

_SIZE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BINARY_NAMES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DURATION_MS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION_SLIPS = {
    "m": "min",
    "sec": "s",
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "mins": "min",
    "minute": "min",
    "minutes": "min",
    "hr": "h",
    "hrs": "h",
    "hour": "h",
    "hours": "h",
    "day": "d",
    "days": "d",
}

# More digits than any machine has bytes or any run has milliseconds: a slip of the
# hand, and arithmetic on thousands of digits is not worth having.
_MOST_DIGITS = 18

_quantity = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)", re.ASCII)
_duration_part = re.compile(rf"({_NUMBER}) ?([A-Za-z]+) ?", re.ASCII)


def parse_bytes(text: str) -> int:
    """The number of bytes that a size with its unit names, rounded down.

    Raises:
        ValueError: Not a size. Its text is a hint for the user, and may be empty.
    """
    match = _quantity.fullmatch(text)
    if match is None:
        raise ValueError("")
    number, unit = match.groups()
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(_size_hint(number, unit))
    return _times(number, factor)


def format_bytes(count: int) -> str:
    """A size for people: exact when it is a whole number of its unit."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    for name, factor in _BINARY_NAMES:
        if count >= factor:
            whole, rest = divmod(count, factor)
            if rest == 0:
                return f"{sign}{whole}{name}"
            return f"{sign}{_three_digits(count / factor)}{name}"
    return f"{sign}{count}B"


def parse_duration(text: str) -> float:
    """The seconds that a time with its units names; ``1h30min`` adds up.

    Raises:
        ValueError: Not a time. Its text is a hint for the user, and may be empty.
    """
    if _quantity.fullmatch(text) and text.replace(".", "").isdigit():
        raise ValueError(f"add a unit: {text}s or {text}min")
    total_ms, end = 0.0, 0
    while end < len(text):
        match = _duration_part.match(text, end)
        if match is None:
            raise ValueError("")
        number, unit = match.groups()
        factor = _DURATION_MS.get(unit)
        if factor is None:
            known = _DURATION_SLIPS.get(unit.lower())
            raise ValueError(
                f"did you mean {number}{known}?" if known else "units: ms, s, min, h, d"
            )
        total_ms += _times(number, factor * 1000) / 1000
        end = match.end()
    if end == 0:
        raise ValueError("")
    return total_ms / 1000


def format_duration(seconds: float) -> str:
    """A time for people: ``850ms``, ``2.5s``, ``1h30min``."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds == 0:
        return "0s"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)}s"
    parts, rest = [], round(seconds)
    for name, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{name}")
    return "".join(parts)


def parse_fraction(text: str) -> float:
    """The fraction that a percentage names: ``8%`` is 0.08. At most ``100%``.

    Raises:
        ValueError: Not a percentage. Its text is a hint, and may be empty.
    """
    number = text[:-1].removesuffix(" ") if text.endswith("%") else ""
    if not re.fullmatch(_NUMBER, number, re.ASCII):
        raise ValueError(_fraction_hint(text))
    if len(number) > _MOST_DIGITS or float(number) > 100:
        raise ValueError("at most 100%")
    return float(number) / 100


def format_fraction(fraction: float) -> str:
    """A fraction as a percentage: 0.08 is ``8%``."""
    return f"{_three_digits(fraction * 100)}%"


def _times(number: str, factor: int) -> int:
    """Decimal text times a whole factor, exactly, rounded down."""
    whole, _, decimals = number.partition(".")
    if len(whole.lstrip("0")) + len(decimals) > _MOST_DIGITS:
        raise ValueError("too many digits")
    return int(whole + decimals) * factor // int(f"1{'0' * len(decimals)}")


def _three_digits(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _size_hint(number: str, unit: str) -> str:
    if not unit:
        return f"add a unit: {number}MiB or {number}GiB"
    letter = unit[0].upper()
    if letter in "KMGT" and unit[1:] in ("", "i"):
        # 20G is 20 * 10^9 to Kubernetes and 20 * 2^30 to Docker.
        return f"did you mean {number}{letter}iB?"
    return "units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"


def _fraction_hint(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return ""
    return f"did you mean {_three_digits(value * 100)}%?" if 0 < value < 1 else ""
