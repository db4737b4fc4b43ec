"""Whose code a value is: the user's, which may change, or an installed library's.

A library is known by its name and version. Where neither that nor the code can be
known, nothing certain can be said: ``Unkeyable``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
import types
from typing import Any

__all__ = [
    "Unkeyable", "check_repeatable", "content", "is_own", "is_own_class",
    "is_own_code", "is_own_module", "version",
]  # fmt: skip

# Modules of Python's own library that give the same for the same arguments. Others tell
# of the machine, the time of day, files or chance.
_REPEATABLE = frozenset(
    {
        "abc", "argparse", "builtins", "cmath", "collections", "contextlib", "copy",
        "dataclasses", "enum", "functools", "inspect", "itertools", "logging", "math",
        "numbers", "operator", "re", "string", "textwrap", "time", "types", "typing",
        "warnings",
    }
)  # fmt: skip


class Unkeyable(Exception):
    """Nothing certain can be said of a value; the text says of which."""


def content(cell: types.CellType) -> Any:
    """What a closure's cell holds; None where it was not filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_own(value: Any, depth: int = 8) -> bool:
    """Whether a value is, or wraps, code of the user's."""
    if isinstance(value, types.FunctionType):
        if is_own_code(value.__code__):
            return True
        cells = value.__closure__ or ()
        return depth > 0 and any(is_own(content(c), depth - 1) for c in cells)
    if isinstance(value, types.MethodType):
        return is_own(value.__func__, depth)
    if isinstance(value, functools.partial):
        return is_own(value.func, depth)
    if isinstance(value, types.ModuleType):
        return False
    if hasattr(type(value), "python_function"):  # a tf.function
        return depth > 0 and is_own(value.python_function, depth - 1)
    return is_own_class(value if isinstance(value, type) else type(value))


def is_own_class(cls: type) -> bool:
    """Whether the user wrote the class."""
    if cls.__module__ == "builtins":
        return False
    module = sys.modules.get(cls.__module__)
    return module is None or is_own_module(module)


def is_own_module(module: types.ModuleType) -> bool:
    """Whether the user wrote the module."""
    if module.__name__ == "__main__":
        return True  # the script, though another file may have been started with it
    top = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None)
    if file is None:  # made by code, built in, or a folder without code
        file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return top not in sys.stdlib_module_names
    return _is_own_file(file)


def is_own_code(code: types.CodeType) -> bool:
    """Whether the user wrote the code."""
    return _is_own_file(code.co_filename)


def _is_own_file(file: str) -> bool:
    return not file.startswith("<frozen") and not _in_library(file)


@functools.lru_cache(maxsize=4096)
def _in_library(file: str) -> bool:
    return os.path.realpath(file).startswith(_library_folders())


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """Where installed packages are, and this one, which may be in a checkout."""
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    folders.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def check_repeatable(module: str) -> None:
    """Refuses modules whose results change from call to call.

    Raises:
        Unkeyable: the module is one of these.
    """
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top.lstrip("_") not in _REPEATABLE:
        raise Unkeyable(f"code that uses the module {top}")


@functools.lru_cache(maxsize=1024)
def version(module: str) -> str:
    """The version of the package that a module belongs to.

    Raises:
        Unkeyable: it has none.
    """
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("oomrun", "None"):
        return ""  # that of Python is in the key, and our own
    found = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        raise Unkeyable(f"code of {top}, whose version is not known") from None
