"""The state of the user's callbacks: saved as plain data, put back after a restart.

What a callback keeps in attributes of plain kinds (EarlyStopping's patience and best
weights, ReduceLROnPlateau's counters, the history) is kept; open files, functions and
other objects are what the script itself makes anew when it runs from the top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from oomrun.worker.encoding import Unencodable, encode

__all__ = ["plain", "prepare_to_resume", "restore", "save"]

_NOT_STATE = frozenset({"_model", "model", "params", "validation_data"})


def save(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """The plain attributes of each callback, in order, with its class's name."""
    return [
        {"class": type(callback).__name__, "attributes": _attributes(callback)}
        for callback in callbacks
    ]


def _attributes(callback: Any) -> dict[str, Any]:
    kept, _ = plain(vars(callback))
    return {name: value for name, value in kept.items() if name not in _NOT_STATE}


def plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of ``values`` can be kept in a checkpoint, and the names of what cannot."""
    kept, left_out = {}, []
    for name, value in values.items():
        try:
            encode(value, {}, name)
        except Unencodable:
            left_out.append(name)
        else:
            kept[name] = value
    return kept, left_out


def restore(callbacks: Sequence[Any], saved: Sequence[dict[str, Any]]) -> None:
    """Puts attributes back where class and order are as they were."""
    for callback, state in zip(callbacks, saved, strict=False):
        if type(callback).__name__ == state["class"]:
            _choose_comparison(callback, state["attributes"])
            for name, value in state["attributes"].items():
                setattr(callback, name, value)


def _choose_comparison(callback: Any, saved: dict[str, Any]) -> None:
    """Does now what Keras's monitoring callbacks do when first needed.

    They choose how to compare, a function and so not among what is saved, and turn the
    sign of ``min_delta``, which is: done after restoring, it would be turned twice.
    """
    was_chosen = "monitor_op" not in saved
    if was_chosen and getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def prepare_to_resume(callbacks: Sequence[Any]) -> None:
    """Has callbacks that write files go on with the file of the attempt before."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
