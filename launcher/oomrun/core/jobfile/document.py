"""YAML text -> located nodes.

Covers: the syntax, and what a job file does without: anchors, tags, merge keys,
several documents, keys that are not text, deep nesting, control characters.
Does not cover: which keys there are and what they mean (``fields``, ``reading``).

It builds the tree from the parser's events instead of ``yaml.compose``: that recurses
once per level, keeps the last of two equal keys, and follows aliases.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from oomrun.core.errors import Problem, SpecError
from oomrun.core.jobfile.nodes import (
    Broken,
    Entry,
    Listing,
    Node,
    Place,
    Scalar,
    Table,
    join,
    shorten,
)
from oomrun.core.jobfile.scalars import Meaning, meaning
from oomrun.core.jobfile.syntax import syntax_advice

MAX_DEPTH = 16  # the job file itself needs 4
MAX_CHARACTERS = 1 << 20

_line_break = re.compile(r"\r\n|\n|\r")
# What YAML does not call printable, and the line breaks that no editor counts as lines.
_forbidden = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
)


def decode(data: bytes, *, filename: str) -> str:
    """The text of a job file's bytes.

    Raises:
        SpecError: It is not UTF-8; located at the first wrong byte.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        lines = _line_break.split(before)
        place = Place(filename, len(lines), len(lines[-1]) + 1, lines[-1])
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = "it looks like UTF-16; save it as UTF-8"
        else:
            hint = "save the file as UTF-8"
        wrong = f"expected UTF-8, got the byte 0x{data[error.start]:02x}"
        raise SpecError([place.problem("", wrong, hint)]) from None


def parse(
    text: str, *, file: str, path: str = "", shown: str | None = None
) -> tuple[Node | None, list[Problem]]:
    """The root, or None if there is none or it is unreadable, and what is wrong.

    Args:
        text: The YAML text.
        file: What problems call it.
        path: Where in the job file this document stands.
        shown: What to show as source lines, if that is not ``text`` itself.
    """
    text = text.removeprefix("\ufeff")
    builder = _Builder(file, path, _line_break.split(shown or text))
    forbidden = _forbidden.search(text)
    if len(text) > MAX_CHARACTERS:
        builder.report(builder.at(0, 0), path, "the job file is larger than 1 MiB")
    elif forbidden:
        builder.report_forbidden(text, forbidden.start())
    else:
        _build(builder, text)
    return builder.root, builder.problems


class _Frame:
    """A collection that is being read."""

    def __init__(self, place: Place, path: str, mapping: bool) -> None:
        self.place, self.path, self.mapping = place, path, mapping
        self.items: list[Node] = []
        self.entries: list[Entry] = []
        self.keys: set[str] = set()
        # The key whose value comes next; its name is None if it was refused.
        self.key: tuple[str | None, Place] | None = None

    def next_path(self) -> str:
        if not self.mapping:
            return f"{self.path}[{len(self.items)}]"
        return join(self.path, self.key[0]) if self.key and self.key[0] else self.path


class _Stop(Exception):
    """The rest of the document is not worth reading."""


class _Builder:
    """Builds nodes from parser events; ``problems`` collects what is wrong."""

    def __init__(self, file: str, path: str, lines: Sequence[str]) -> None:
        self.problems: list[Problem] = []
        self.root: Node | None = None
        self._file, self._path, self._lines = file, path, lines
        self._frames: list[_Frame] = []
        self._documents = 0

    def at(self, line: int, column: int) -> Place:
        """The place of a parser's mark: that counts from 0 and may lie past the end."""
        line = min(max(line, 0), len(self._lines) - 1)
        return Place(self._file, line + 1, max(column, 0) + 1, self._lines[line])

    def place_of_error(self, error: Exception) -> Place:
        """Where the parser stopped, or what it missed the end of, if it was the end."""
        mark = getattr(error, "problem_mark", None)
        context = getattr(error, "context_mark", None)
        if mark is None or (context is not None and self._nothing_after(mark)):
            mark = context or mark
        return self.at(mark.line, mark.column) if mark else self.at(0, 0)

    def _nothing_after(self, mark: Any) -> bool:
        rest = self._lines[mark.line : mark.line + 1]
        return not "".join(rest)[mark.column :].strip() and not any(
            line.strip() for line in self._lines[mark.line + 1 :]
        )

    def report(self, place: Place, path: str, message: str, hint: str = "") -> None:
        self.problems.append(place.problem(path, message, hint))

    def report_forbidden(self, text: str, position: int) -> None:
        before = _line_break.split(text[:position])
        place = self.at(len(before) - 1, len(before[-1]))
        code = ord(text[position])
        name = "a NUL character" if code == 0 else f"the character U+{code:04X}"
        self.report(place, self._path, f"{name} cannot stand in a job file")

    def take(self, event: Any) -> None:
        """One event of the parser."""
        mark = event.start_mark
        place = self.at(mark.line, mark.column)
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self.report(place, self._path, "expected one document, got more")
                    raise _Stop
            case yaml.ScalarEvent():
                self._put(self._scalar(event, place))
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._open(place, event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close()
            case yaml.AliasEvent():
                wrong = f"the alias *{shorten(str(event.anchor))} is not allowed"
                self.report(place, self._here(), wrong, "write the value out")
                self._put(Broken(place))
            case _:
                pass

    def _here(self) -> str:
        return self._frames[-1].next_path() if self._frames else self._path

    def _open(self, place: Place, event: Any) -> None:
        path = self._here()
        if len(self._frames) >= MAX_DEPTH:
            self.report(place, path, f"nested deeper than {MAX_DEPTH} levels")
            raise _Stop
        self._refuse_decoration(event, place)
        mapping = isinstance(event, yaml.MappingStartEvent)
        self._frames.append(_Frame(place, path, mapping))

    def _close(self) -> None:
        frame = self._frames.pop()
        if frame.mapping:
            self._put(Table(frame.place, tuple(frame.entries)))
        else:
            self._put(Listing(frame.place, tuple(frame.items)))

    def _put(self, node: Node) -> None:
        """Give a finished node to the collection that it stands in."""
        if not self._frames:
            self.root = node
            return
        frame = self._frames[-1]
        if not frame.mapping:
            frame.items.append(node)
        elif frame.key is None:
            frame.key = (self._key(frame, node), node.place)
        else:
            name, place = frame.key
            frame.key = None
            if name is not None:
                frame.entries.append(Entry(name, place, node))

    def _key(self, frame: _Frame, node: Node) -> str | None:
        """A key's text, or None after saying why it cannot be one."""
        if isinstance(node, Broken):
            return None
        if not isinstance(node, Scalar):
            self.report(node.place, frame.path, "expected text as a key")
            return None
        path = join(frame.path, shorten(node.text))
        if node.trap:
            wrong = f"the key {node.text} is written without quotes, {node.trap}"
            self.report(node.place, path, wrong, f'quote it: "{node.text}"')
        elif node.kind != "text":
            wrong = f"expected text as a key, got {shorten(node.text) or 'nothing'}"
            hint = f'quote it: "{shorten(node.text)}"' if node.text else ""
            self.report(node.place, path, wrong, hint)
        elif node.text == "<<":
            wrong = "merge keys are not allowed"
            self.report(node.place, path, wrong, "write the values out")
        elif node.text in frame.keys:
            first = next((e for e in frame.entries if e.key == node.text), None)
            where = f" (first in line {first.place.line})" if first else ""
            self.report(node.place, path, f"the key is there twice{where}")
        else:
            frame.keys.add(node.text)
            return node.text
        return None

    def _scalar(self, event: Any, place: Place) -> Node:
        text: str = event.value
        decorated = self._refuse_decoration(event, place)
        bad = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
        if bad is not None:  # written as an escape: "\0"
            wrong = f"the character U+{ord(bad):04X} cannot stand in a job file"
            self.report(place, self._here(), wrong)
        if bad is not None or decorated:
            return Broken(place)
        plain = not event.style
        what = meaning(text) if plain else Meaning("text", text)
        return Scalar(place, text, what.kind, what.value, what.trap, what.rewrite)

    def _refuse_decoration(self, event: Any, place: Place) -> bool:
        """Whether the node has a tag or an anchor, after saying so."""
        if event.tag is not None:
            tag = shorten(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
            wrong = f"the tag {tag} is not allowed"
            self.report(place, self._here(), wrong, "write the plain value")
        if event.anchor is not None:
            wrong = f"the anchor &{shorten(event.anchor)} is not allowed"
            self.report(place, self._here(), wrong, "write the value where it is used")
        return event.tag is not None or event.anchor is not None


def _build(builder: _Builder, text: str) -> None:
    try:
        for event in _events(text):
            builder.take(event)
    except _Stop:
        return
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The pure Python parser lets chr() fail on "\UFFFFFFFF" escapes.
        what = getattr(error, "problem", None) or "an invalid character"
        place = builder.place_of_error(error)
        if "nesting" in what:  # libyaml looks ahead, past our own limit
            builder.report(place, "", f"nested deeper than {MAX_DEPTH} levels")
            return
        hint = syntax_advice(what, place.source_line, place.column)
        builder.report(place, "", f"not valid YAML: {what}", hint)


def _events(text: str) -> Iterator[Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events: Iterator[Any] = yaml.parse(text, Loader=loader)
    return events
