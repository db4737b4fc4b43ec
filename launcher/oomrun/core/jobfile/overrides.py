"""``--set memory.headroom=5%``: values from the command line put over the document's.

A path's missing sections are made, and what stands in the way of one is replaced, so
that ``--set batch.micro.max=64`` works where the file says ``micro: auto``.
"""

import re
from collections.abc import Sequence

from oomrun.core.errors import Problem
from oomrun.core.jobfile import document
from oomrun.core.jobfile.nodes import Entry, Node, Place, Table, shorten

FILE = "--set"

_assignment = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.ASCII | re.S)


def apply(root: Table, overrides: Sequence[str]) -> tuple[Table, list[Problem]]:
    """The document with the overrides in it, and what is wrong with those."""
    problems: list[Problem] = []
    for override in overrides:
        match = _assignment.fullmatch(override)
        if match is None:
            place = Place(FILE, 1, 1, shorten(override, 200))
            wrong = f"expected PATH=VALUE, got {shorten(override)!r}"
            hint = "such as --set memory.headroom=5%"
            if "[" in override.partition("=")[0]:
                hint = "set a list as a whole: --set args=[--epochs, 5]"
            problems.append(place.problem("", wrong, hint))
            continue
        path, value = match.groups()
        # Blanks in place of the path keep the columns of the override itself.
        padded = " " * (len(path) + 1) + value
        node, wrongs = document.parse(padded, file=FILE, path=path, shown=override)
        problems.extend(wrongs)
        if node is None and not wrongs:
            place = Place(FILE, 1, len(path) + 2, override)
            problems.append(place.problem(path, "expected a value, got nothing"))
        elif node is not None:
            root = _put(root, path.split("."), node, Place(FILE, 1, 1, override))
    return root, problems


def _put(table: Table, keys: Sequence[str], node: Node, place: Place) -> Table:
    """The table with the node at the path of keys."""
    first, *rest = keys
    if rest:
        found = next((e.value for e in table.entries if e.key == first), None)
        inner = found if isinstance(found, Table) else Table(node.place, ())
        node = _put(inner, rest, node, place)
    entry = Entry(first, place, node)
    if any(old.key == first for old in table.entries):
        entries = tuple(
            # The key of a section stays where it is in the file.
            (old._replace(value=node) if rest else entry) if old.key == first else old
            for old in table.entries
        )
    else:
        entries = (*table.entries, entry)
    return Table(table.place, entries)
