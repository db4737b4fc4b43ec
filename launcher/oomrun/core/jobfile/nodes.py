"""The nodes of a job file's document, each with its place.

Named tuples here and in ``kinds``, where the rest of the core has dataclasses: those
take six times as long to make, and `oomrun validate` has a quarter of a second.
"""

from typing import NamedTuple

from oomrun.core.errors import Problem
from oomrun.core.jobfile.scalars import ScalarKind, Value


class Place(NamedTuple):
    """A place in a file, from 1, with the text of its line."""

    file: str
    line: int
    column: int
    source_line: str = ""

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """This place's problem with what stands at ``path``."""
        return Problem(
            file=self.file,
            line=self.line,
            column=self.column,
            # The user's own text is in them: on one line, and no control characters.
            path=shorten(path, 200),
            message=shorten(message, 400),
            hint=shorten(hint, 200),
            source_line=self.source_line,
        )


class Scalar(NamedTuple):
    """A text, number, flag or nothing; ``text`` is as written, without quotes."""

    place: Place
    text: str
    kind: ScalarKind
    value: Value
    trap: str = ""  # what YAML readers disagree about
    rewrite: str = ""  # the same without the trap


class Listing(NamedTuple):
    """A YAML sequence."""

    place: Place
    items: "tuple[Node, ...]"


class Entry(NamedTuple):
    """A key of a mapping and its value."""

    key: str
    place: Place
    value: "Node"


class Table(NamedTuple):
    """A YAML mapping."""

    place: Place
    entries: tuple[Entry, ...]


class Broken(NamedTuple):
    """Something that has been reported already and is to be passed over."""

    place: Place


Node = Scalar | Listing | Table | Broken


def join(path: str, key: str) -> str:
    """The path of a key in the mapping at ``path``."""
    return f"{path}.{key}" if path else key


def shorten(text: str, limit: int = 40) -> str:
    """A user's text for a message: on one line and not longer than ``limit``."""
    if len(text) <= limit and text.isprintable():
        return text
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
