"""Manifests from YAML, with the place of every value.

Covers: one or several documents, lists (``kind: List``), JSON, which is YAML.
Does not cover: what is wrong with the objects (``lint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

__all__ = ["Located", "Unreadable", "read"]

Place = tuple[int, int]

# Billions of laughs: aliases multiply, and no manifest is that deep.
_MOST_VALUES = 200_000
_DEEPEST = 60


class Unreadable(ValueError):
    """The text is no YAML, or holds no objects; at ``line`` and ``column`` from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1) -> None:
        self.line = line
        self.column = column
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """One object, and where each of its values is, by path (``spec.template``)."""

    manifest: dict[str, Any]
    places: Mapping[str, Place]

    @property
    def kind(self) -> str:
        """Its kind, or "" where it has none."""
        kind = self.manifest.get("kind")
        return kind if isinstance(kind, str) else ""

    @property
    def name(self) -> str:
        """Its name, or "" where it has none."""
        metadata = self.manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else ""

    def place(self, path: str) -> Place:
        """Where the value is, or the nearest thing around it that is there."""
        while path and path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.places.get(path, (1, 1))


def read(text: str) -> list[Located]:
    """All objects of a stream.

    Raises:
        Unreadable: it is no YAML, or something in it is no object.
    """
    try:
        nodes = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node]
        found = [each for node in nodes for each in _objects(node)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        why = " ".join(str(error.problem).split())
        raise Unreadable(f"it is no YAML: {why}", line, column) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"it is no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    if not found:
        raise Unreadable("there is no object in it")
    return found


def _objects(node: yaml.Node) -> list[Located]:
    reader = _Reader()
    value = reader.value(node, "", 0)
    if value is None:  # nothing but a comment between two lines of ---
        return []
    if not isinstance(value, dict):
        raise Unreadable("expected an object, a mapping", *_place(node))
    whole = Located(manifest=value, places=reader.places)
    items = value.get("items")
    if not whole.kind.endswith("List") or not isinstance(items, list):
        return [whole]
    found = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise Unreadable("expected an object, a mapping", *_place(node))
        base = f"items[{index}]"
        cut = len(base) + 1
        places = {
            path[cut:]: at
            for path, at in reader.places.items()
            if path == base or path.startswith(f"{base}.")
        }
        found.append(Located(manifest=item, places=places))
    return found


class _Reader:
    """Makes plain values of nodes, as the safe loader does, and keeps their places."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._made = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        if len(self.places) > _MOST_VALUES or depth > _DEEPEST:
            raise Unreadable("it is too large, or nested too deeply", *_place(node))
        self.places[path] = _place(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(node.value)
            ]
        return self._made.construct_object(node, deep=True)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if not name or name == "<<":
                raise Unreadable("expected a plain key", *_place(key))
            if name in found:
                raise Unreadable(f"the key {name} is there twice", *_place(key))
            inner = f"{path}.{name}" if path else name
            found[name] = self.value(value, inner, depth + 1)
        return found


def _place(node: yaml.Node) -> Place:
    return node.start_mark.line + 1, node.start_mark.column + 1
