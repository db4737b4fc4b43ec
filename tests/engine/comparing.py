"""Two runs of the same training, number by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["differences", "numbers"]

# Below this norm an array is compared absolutely: it is made of rounding alone.
_FLOOR = 1e-3


def numbers(value: Any) -> dict[str, Any]:
    """All numbers in what a row returned, copied, each by a path that names it."""
    return {path.rstrip("/"): number for path, number in _numbers(value, "")}


def _numbers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.Model):
        yield from _of_model(value, path)
    elif isinstance(value, keras.callbacks.History):
        yield from _numbers(value.history, f"{path}history/")
        yield f"{path}epochs", np.array(value.epoch)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _numbers(value[key], f"{path}{key}/")
    elif isinstance(value, tuple | list) and not _flat(value):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}{index}/")
    elif isinstance(value, tf.RaggedTensor):
        yield from _numbers(value.flat_values, path)
    elif value is None or isinstance(value, str):
        yield path, value
    else:
        yield path, np.array(keras.ops.convert_to_numpy(value))


def _flat(value: Any) -> bool:
    return bool(value) and all(isinstance(item, int | float) for item in value)


def _of_model(model: Any, path: str) -> Iterator[tuple[str, Any]]:
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    # By place, as a saved file has them: an optimizer's may be built in another scope.
    for index, variable in enumerate(variables):
        if "seed_generator" not in variable.path:
            yield f"{path}{index}:{variable.name}", np.array(variable.value.numpy())


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float
) -> list[str]:
    """What is not alike, a line each; at ``tolerance`` 0 every bit counts."""
    lines = [f"only plain Keras has {name}" for name in theirs.keys() - ours.keys()]
    lines += [f"only oomrun has {name}" for name in ours.keys() - theirs.keys()]
    for name in theirs:
        if name in ours and (line := _difference(ours[name], theirs[name], tolerance)):
            lines.append(f"{name}: {line}")
    return lines


def _difference(found: Any, wanted: Any, tolerance: float) -> str:
    if not isinstance(found, np.ndarray) or not isinstance(wanted, np.ndarray):
        return (
            "" if found is wanted or found == wanted else f"{found!r}, not {wanted!r}"
        )
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype}{found.shape}, not {wanted.dtype}{wanted.shape}"
    if wanted.dtype.kind not in "fcV" or tolerance == 0:
        same = found.tobytes() == wanted.tobytes()
        return "" if same else f"{_short(found)}, not {_short(wanted)}"
    a, b = found.astype("float64"), wanted.astype("float64")
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return f"{_short(a)}, not {_short(b)}"
    finite = np.isfinite(b)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    error /= max(float(np.linalg.norm(b[finite])), _FLOOR)
    if error <= tolerance:
        return ""
    return f"{error:.1e} of its norm apart: {_short(a)}, not {_short(b)}"


def _short(array: np.ndarray[Any, Any]) -> str:
    return np.array2string(array.reshape(-1)[:4], precision=12, threshold=4)
