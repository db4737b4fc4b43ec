"""What a YAML scalar means, and which ones mean different things to different readers.

YAML 1.1 (PyYAML, Ansible, many editors) and YAML 1.2 disagree on ``on``, ``012``,
``1_000``, ``1:30`` and dates. A job file must not depend on who reads it, so these are
called traps and are refused wherever they stand without quotes.
"""

import re
from typing import Literal, NamedTuple

ScalarKind = Literal["text", "whole", "number", "flag", "nothing"]
Value = str | int | float | bool | None

# Python refuses to convert longer ones, and no key here takes them.
_MOST_DIGITS = 30


class Meaning(NamedTuple):
    """A plain scalar's kind and value; ``trap`` says what readers disagree about.

    ``rewrite`` is the same without the trap, where there is such a thing.
    """

    kind: ScalarKind
    value: Value
    trap: str = ""
    rewrite: str = ""


_FLAGS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_ON_OFF = {
    word: value
    for lower, value in (("yes", True), ("on", True), ("no", False), ("off", False))
    for word in (lower, lower.capitalize(), lower.upper())
}
_FIRST = frozenset("+-.0123456789")
_whole = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_hexadecimal = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_number = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII
)
_octal_old = re.compile(r"[-+]?0[0-9_]+", re.ASCII)
_octal_new = re.compile(r"0o[0-7]+", re.ASCII)
_binary = re.compile(r"[-+]?0b[01_]+", re.ASCII)
_grouped = re.compile(
    r"[-+]?(?:0x[0-9a-fA-F_]+|[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?)",
    re.ASCII,
)
_base_sixty = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?", re.ASCII)
_date = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?", re.ASCII)
_not_finite = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def meaning(text: str) -> Meaning:
    """What a scalar without quotes stands for."""
    if text in _NOTHING:
        return Meaning("nothing", None)
    if text in _FLAGS:
        return Meaning("flag", _FLAGS[text])
    if text in _ON_OFF:
        word = "true" if _ON_OFF[text] else "false"
        return _trapped(text, f"which YAML 1.1 reads as {word}", word)
    if text[0] not in _FIRST:
        return Meaning("text", text)
    return _numeric(text)


def _numeric(text: str) -> Meaning:
    if len(text) > _MOST_DIGITS:
        return Meaning("text", text)
    if _whole.fullmatch(text):
        return Meaning("whole", int(text))
    if _hexadecimal.fullmatch(text):
        return Meaning("whole", int(text, 16))
    trap = _numeric_trap(text)
    if trap is not None:
        return trap
    if _number.fullmatch(text):
        return Meaning("number", float(text))
    return Meaning("text", text)


def _numeric_trap(text: str) -> Meaning | None:
    if _octal_old.fullmatch(text):
        plain = text.replace("_", "").lstrip("+-0") or "0"
        return _trapped(text, "which YAML 1.1 reads as octal", plain)
    if _octal_new.fullmatch(text):
        decimal = str(int(text[2:], 8))
        return _trapped(text, "which only YAML 1.2 reads as octal", decimal)
    if _binary.fullmatch(text):
        return _trapped(text, "which only YAML 1.1 reads as binary", "")
    if "_" in text and _grouped.fullmatch(text):
        plain = text.replace("_", "")
        return _trapped(text, "which only YAML 1.1 reads as a number", plain)
    if _base_sixty.fullmatch(text):
        return _trapped(text, "which YAML 1.1 reads as a number of base 60", "")
    if _date.fullmatch(text):
        return _trapped(text, "which YAML 1.1 reads as a date", "")
    if _not_finite.fullmatch(text):
        return _trapped(text, "which YAML reads as a number that is not finite", "")
    return None


def _trapped(text: str, trap: str, rewrite: str) -> Meaning:
    return Meaning("text", text, trap=trap, rewrite=rewrite)
