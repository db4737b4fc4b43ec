"""The kinds of value that a job file's keys can have.

A kind says in words what it expects, what value a scalar stands for, and the same as
JSON Schema. The tables in ``fields`` are made of these; ``reading`` checks documents
against them, and the schema and the reference are printed from them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from oomrun.core.jobfile.nodes import Scalar

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Unfit(ValueError):
    """The scalar is not of this kind; the text is a hint and may be empty."""


class Missing:
    """Stands for "no default"."""


MISSING = Missing()


class Text(NamedTuple):
    """A text that ``check`` accepts: it returns a value or raises ValueError(hint)."""

    words: str
    check: Callable[[str], object] = str
    pattern: str | None = None
    longest: int = 4096
    expands: bool = False  # whether ${VAR} is filled in
    any_number: bool = False  # whether a number is taken as it is written

    def take(self, scalar: Scalar) -> object:
        """The value of the scalar, or Unfit."""
        if scalar.kind != "text" and not self._takes_number(scalar):
            raise Unfit(self._hint(scalar))
        if len(scalar.text) > self.longest:
            raise Unfit(f"at most {self.longest} characters")
        return self._checked(scalar.text)

    def schema(self) -> dict[str, Json]:
        """The same as JSON Schema."""
        of_type: Json = ["string", "number"] if self.any_number else "string"
        result: dict[str, Json] = {"type": of_type}
        if self.pattern:
            result["pattern"] = self.pattern
        return result

    def _takes_number(self, scalar: Scalar) -> bool:
        return self.any_number and scalar.kind in ("whole", "number")

    def _checked(self, text: str) -> object:
        try:
            return self.check(text)
        except ValueError as error:
            raise Unfit(str(error)) from None

    def _hint(self, scalar: Scalar) -> str:
        if scalar.kind == "nothing":
            return ""
        try:
            self._checked(scalar.text)
        except Unfit as unfit:
            return str(unfit)
        return f'quote it: "{scalar.text}"'


class Whole(NamedTuple):
    """A whole number in a range."""

    words: str
    low: int
    high: int
    make: Callable[[int], object] = int

    def take(self, scalar: Scalar) -> object:
        """The value of the scalar, or Unfit."""
        value = scalar.value
        if scalar.kind != "whole" or not isinstance(value, int):
            digits = scalar.kind == "text" and scalar.text.isdecimal()
            raise Unfit("write it without quotes" if digits else "")
        if value < self.low:
            raise Unfit(f"at least {self.low}")
        if value > self.high:
            raise Unfit(f"at most {self.high}")
        return self.make(value)

    def schema(self) -> dict[str, Json]:
        """The same as JSON Schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Flag(NamedTuple):
    """true or false."""

    words: str = "true or false"

    def take(self, scalar: Scalar) -> object:
        """The value of the scalar, or Unfit."""
        if scalar.kind != "flag":
            word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(
                scalar.text.lower()
            )
            raise Unfit(f"write {word}" if word else "")
        return scalar.value

    def schema(self) -> dict[str, Json]:
        """The same as JSON Schema."""
        return {"type": "boolean"}


class Choice(NamedTuple):
    """One of some words; the mapping gives the value of each."""

    values: Mapping[str, object]

    @property
    def words(self) -> str:
        """What it expects."""
        return _alternatives(list(self.values))

    def take(self, scalar: Scalar) -> object:
        """The value of the scalar, or Unfit."""
        if scalar.kind != "text" or scalar.text not in self.values:
            raise Unfit("")
        return self.values[scalar.text]

    def schema(self) -> dict[str, Json]:
        """The same as JSON Schema."""
        return {"enum": list(self.values)}


ScalarType = Text | Whole | Flag | Choice


class ListOf(NamedTuple):
    """A list of scalars of one kind."""

    words: str
    item: "ScalarType | OneOf"
    shortest: int = 0
    unique: bool = False


class MapOf(NamedTuple):
    """A mapping with keys of the user's own, such as environment variables."""

    words: str
    key: Text
    value: ScalarType


class Field(NamedTuple):
    """A key of a section: what it is for and what it may be.

    ``default`` and ``examples`` are what one would write in the job file.
    """

    key: str
    kind: "Kind"
    about: str
    default: "Json | Missing" = MISSING
    examples: tuple[Json, ...] = ()
    required: bool = False


class Section(NamedTuple):
    """A mapping with known keys."""

    words: str
    fields: tuple[Field, ...] = ()


class OneOf(NamedTuple):
    """Any of some kinds: at most one ListOf and one Section among them."""

    options: "tuple[ScalarType | ListOf | Section, ...]"

    @property
    def words(self) -> str:
        """What it expects."""
        return _alternatives([option.words for option in self.options])


Kind = ScalarType | ListOf | MapOf | Section | OneOf


def choice(*words: str) -> Choice:
    """A choice whose words are their own values."""
    return Choice({word: word for word in words})


def _alternatives(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"
