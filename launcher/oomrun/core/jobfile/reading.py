"""Located nodes against the table of keys -> values by path, and problems.

Covers: unknown and missing keys, types, ranges, traps, variables; every key by itself.
Does not cover: how keys go together (``checks``).
"""

from collections.abc import Iterable, Mapping

from oomrun.core.errors import Problem
from oomrun.core.jobfile.expansion import ExpansionError, expand
from oomrun.core.jobfile.kinds import (
    Choice,
    Kind,
    ListOf,
    MapOf,
    OneOf,
    ScalarType,
    Section,
    Text,
    Unfit,
)
from oomrun.core.jobfile.nodes import (
    Broken,
    Listing,
    Node,
    Place,
    Scalar,
    Table,
    join,
    shorten,
)
from oomrun.core.jobfile.scalars import Meaning, meaning


class Reading:
    """What was read so far.

    A path is in ``values`` only if its value is good. ``places`` has every value that
    is in the document, good or not; ``keys`` has the places of the keys.
    ``templates`` has the texts as templates of a command: with the braces doubled of
    what variables were expanded to.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.values: dict[str, object] = {}
        self.places: dict[str, Place] = {}
        self.keys: dict[str, Place] = {}
        self.templates: dict[str, str] = {}
        self.problems: list[Problem] = []

    def report(self, path: str, message: str, hint: str = "") -> None:
        """A problem with the value at ``path``."""
        self.problems.append(self.places[path].problem(path, message, hint))


def read(node: Node, section: Section, environment: Mapping[str, str]) -> Reading:
    """Read a whole document."""
    reading = Reading(environment)
    _read(reading, node, section, "")
    return reading


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, as a hint, or ""."""
    if len(word) > 40:  # matching takes quadratic time
        return ""
    from difflib import get_close_matches  # costs 5 ms, and most files have no slips

    folded = {name.lower().replace("-", "_"): name for name in known}
    close = get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f"did you mean {folded[close[0]]}?" if close else ""


def _read(reading: Reading, node: Node, kind: Kind, path: str) -> bool:
    """Read one node; whether it was good."""
    reading.places[path] = node.place
    if isinstance(node, Broken):
        return False
    match kind:
        case Section():
            return _read_section(reading, node, kind, path)
        case MapOf():
            return _read_map(reading, node, kind, path)
        case ListOf():
            return _read_list(reading, node, kind, path)
        case OneOf():
            return _read_one_of(reading, node, kind, path)
        case _:
            return _read_scalar(reading, node, (kind,), kind.words, path)


def _read_section(reading: Reading, node: Node, section: Section, path: str) -> bool:
    if not isinstance(node, Table):
        return _mismatch(reading, node, section.words, path)
    known = {known.key: known for known in section.fields}
    good = True
    for entry in node.entries:
        key_path = join(path, entry.key)
        if entry.key in known:
            reading.keys[key_path] = entry.place
            good &= _read(reading, entry.value, known[entry.key].kind, key_path)
            continue
        good = False
        message = f"expected a known key, got {shorten(entry.key)}"
        hint = nearest(entry.key, known) or f"known: {', '.join(known)}"
        problem = entry.place.problem(join(path, shorten(entry.key)), message, hint)
        reading.problems.append(problem)
    present = {entry.key for entry in node.entries}
    for required in section.fields:
        if required.required and required.key not in present:
            good = False
            example = f"such as {required.key}: {required.examples[0]}"
            reading.report(path, f"expected the key {required.key}", example)
    return good


def _read_map(reading: Reading, node: Node, kind: MapOf, path: str) -> bool:
    if not isinstance(node, Table):
        return _mismatch(reading, node, kind.words, path)
    good, pairs = True, []
    for entry in node.entries:
        key_path = join(path, entry.key)
        reading.keys[key_path] = entry.place
        try:
            kind.key.take(Scalar(entry.place, entry.key, "text", entry.key))
        except Unfit as unfit:
            good = False
            message = f"expected {kind.key.words}, got {shorten(entry.key)!r}"
            shown = join(path, shorten(entry.key))
            reading.problems.append(entry.place.problem(shown, message, str(unfit)))
        if _read(reading, entry.value, kind.value, key_path):
            pairs.append((entry.key, reading.values[key_path]))
        else:
            good = False
    reading.values[path] = tuple(pairs)
    return good


def _read_list(reading: Reading, node: Node, kind: ListOf, path: str) -> bool:
    if not isinstance(node, Listing):
        return _mismatch(reading, node, kind.words, path)
    if len(node.items) < kind.shortest:
        reading.report(path, f"expected {kind.words}, got an empty list")
        return False
    good, items = True, []
    for index, item in enumerate(node.items):
        item_path = f"{path}[{index}]"
        if not _read(reading, item, kind.item, item_path):
            good = False
            continue
        value = reading.values[item_path]
        if kind.unique and value in items:
            good = False
            reading.report(item_path, f"{_shown(item)} is in the list twice")
        items.append(value)
    if good:
        reading.values[path] = tuple(items)
    return good


def _read_one_of(reading: Reading, node: Node, kind: OneOf, path: str) -> bool:
    """A list or a mapping has one option that it can be, a scalar may have several."""
    scalars: list[ScalarType] = []
    for option in kind.options:
        if isinstance(option, Section):
            if isinstance(node, Table):
                return _read_section(reading, node, option, path)
        elif isinstance(option, ListOf):
            if isinstance(node, Listing):
                return _read_list(reading, node, option, path)
        else:
            scalars.append(option)
    return _read_scalar(reading, node, tuple(scalars), kind.words, path)


def _read_scalar(
    reading: Reading, node: Node, kinds: tuple[ScalarType, ...], words: str, path: str
) -> bool:
    if not isinstance(node, Scalar):
        return _mismatch(reading, node, words, path)
    if node.trap:
        wrong = f"expected {words}, got {node.text} without quotes, {node.trap}"
        reading.report(path, wrong, _trap_hint(node, kinds))
        return False
    hints = []
    for kind in kinds:
        try:
            expanded = _expanded(node, kind, reading.environment)
            reading.values[path] = kind.take(expanded)
            if isinstance(kind, Text) and kind.expands:
                reading.templates[path] = _as_template(node, reading.environment)
            return True
        except ExpansionError as error:
            reading.report(path, str(error), error.hint)
            return False
        except Unfit as unfit:
            hints.append(str(unfit))
    known = [w for kind in kinds if isinstance(kind, Choice) for w in kind.values]
    hint = nearest(node.text, known) if known and node.kind == "text" else ""
    hint = hint or next((each for each in hints if each), "")
    return _mismatch(reading, node, words, path, hint)


def _trap_hint(node: Scalar, kinds: tuple[ScalarType, ...]) -> str:
    """To rewrite the value or to quote it: what would be taken then."""
    advice = []
    if node.rewrite and _fits(node.place, meaning(node.rewrite), kinds):
        advice.append(f"write {node.rewrite}")
    if _fits(node.place, Meaning("text", node.text), kinds):
        advice.append(f'quote it: "{node.text}"')
    return ", or ".join(advice)


def _fits(place: Place, what: Meaning, kinds: tuple[ScalarType, ...]) -> bool:
    scalar = Scalar(place, str(what.value), what.kind, what.value)
    for kind in kinds:
        try:
            kind.take(scalar)
            return True
        except Unfit:
            continue
    return False


def _expanded(node: Scalar, kind: ScalarType, env: Mapping[str, str]) -> Scalar:
    if isinstance(kind, Text) and kind.expands and "${" in node.text:
        text = expand(node.text, env)
        return Scalar(node.place, text, "text", text)
    return node


def _as_template(node: Scalar, env: Mapping[str, str]) -> str:
    def doubled(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    return expand(node.text, env, doubled)


def _mismatch(
    reading: Reading, node: Node, words: str, path: str, hint: str = ""
) -> bool:
    if isinstance(node, Scalar) and node.kind == "nothing":
        hint = "leave the key out for its default" if path else ""
    reading.report(path, f"expected {words}, got {_shown(node)}", hint)
    return False


def _shown(node: Node) -> str:
    match node:
        case Scalar(kind="nothing"):
            return "nothing"
        case Scalar(kind="text", text=text):
            return f"'{shorten(text)}'"
        case Scalar(text=text):
            return shorten(text)
        case Listing():
            return "a list"
        case _:
            return "a mapping"
