"""Events as JSON objects, and back.

A field that this version does not know is dropped, an event that it does not know is
kept as ``ev.Unknown``: a journal of a newer oomrun can be read.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from oomrun.core import events as ev

__all__ = ["EVENT_VERSION", "MalformedEventError", "from_json", "to_json"]

EVENT_VERSION = 1

# Whatever is counted fits into 64 bits, as it must for other readers of the journal.
_LARGEST_INT = 2**63 - 1


class MalformedEventError(ValueError):
    """A JSON value is not an event."""


_TYPES: dict[str, type[ev.Event]] = {
    cls.type: cls
    for cls in (getattr(ev, name) for name in ev.__all__)
    if issubclass(cls, ev.Event) and cls not in (ev.Event, ev.Unknown)
}


def to_json(event: ev.Event) -> dict[str, Any]:
    """The event as a JSON object: ``v``, ``type``, ``at``, then its own fields."""
    if isinstance(event, ev.Unknown):
        return dict(event.original)
    body = {f.name: _plain(getattr(event, f.name)) for f in fields(event)}
    return {"v": EVENT_VERSION, "type": event.type, **body}


def _plain(value: Any) -> Any:
    if isinstance(value, ev.DeviceMemory):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def from_json(value: object) -> ev.Event:
    """Reads an event back.

    Fields this version does not know are dropped; missing ones take their defaults.

    Raises:
        MalformedEventError: no object, no ``at``, or a field of a wrong type.
    """
    if not isinstance(value, Mapping):
        raise MalformedEventError(f"an event is a JSON object, got {value!r}")
    at = value.get("at")
    if not isinstance(at, int | float) or isinstance(at, bool) or (
        abs(at) > _LARGEST_INT
    ):  # fmt: skip
        raise MalformedEventError(f"an event has a time 'at', got {at!r}")
    cls = _TYPES.get(str(value.get("type")))
    if cls is None:
        return ev.Unknown(at=float(at), original=dict(value))
    arguments = {
        name: _typed(value[name], hint, f"{cls.type}.{name}")
        for name, hint in _hints(cls).items()
        if name in value
    }
    try:
        return cls(**arguments)
    except TypeError as error:
        raise MalformedEventError(f"{cls.type}: {error}") from None


# Asked for with every event, and slow to find out.
_known_hints: dict[type, dict[str, Any]] = {}


def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    if cls not in _known_hints:
        hints = typing.get_type_hints(cls)
        _known_hints[cls] = {item.name: hints[item.name] for item in fields(cls)}
    return _known_hints[cls]


def _typed(value: Any, hint: Any, where: str) -> Any:
    """``value`` as ``hint`` wants it; JSON has neither tuples nor exact floats."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _typed(value, options[0], where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise MalformedEventError(f"{where}: a list was expected, got {value!r}")
        inner = typing.get_args(hint)[0]
        return tuple(_typed(item, inner, where) for item in value)
    if hint is ev.DeviceMemory:
        return _device_memory(value, where)
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise MalformedEventError(f"{where}: an integer of more than 64 bits")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is not None:
        hint = origin
    if hint is Any:
        return value
    wrong_bool = isinstance(value, bool) and hint is not bool
    if wrong_bool or not isinstance(value, hint):
        raise MalformedEventError(
            f"{where}: {hint.__name__} was expected, got {value!r}"
        )
    return value


def _device_memory(value: Any, where: str) -> ev.DeviceMemory:
    if not isinstance(value, Mapping):
        raise MalformedEventError(f"{where}: an object was expected, got {value!r}")
    known = {
        name: _typed(value[name], hint, f"{where}.{name}")
        for name, hint in _hints(ev.DeviceMemory).items()
        if name in value
    }
    if "device" not in known:
        raise MalformedEventError(f"{where}: 'device' is missing")
    return ev.DeviceMemory(**known)
