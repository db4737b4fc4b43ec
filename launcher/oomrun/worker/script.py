"""Runs the user's program as Python itself would: as ``__main__``, unmodified.

Covers: a script by its path, a module by its name. ``runpy`` is not used for scripts:
it removes ``__main__`` again before exit handlers and threads of the script are done.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence

__all__ = ["run_module", "run_script"]


def run_script(path: str, args: Sequence[str]) -> None:
    """Runs the script at ``path`` as ``python path args…`` would.

    Raises:
        BaseException: whatever the script raises, ``SystemExit`` included.
    """
    sys.argv = [path, *args]
    # As Python does: what is imported lies beside the file that a link leads to.
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __spec__=None,
        __cached__=None,
    )
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def run_module(name: str, args: Sequence[str]) -> None:
    """Runs the module ``name`` as ``python -m name args…`` would.

    Raises:
        ModuleNotFoundError: there is no such module, or it is a package without
            ``__main__``.
        BaseException: whatever the module raises.
    """
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader = spec.loader if spec is not None else None
    if spec is None or not isinstance(loader, importlib.machinery.SourceFileLoader):
        raise ModuleNotFoundError(
            f"no module named {name!r} that can be run", name=name
        )
    sys.argv = [loader.path, *args]
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=loader.path,
        __builtins__=builtins,
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=None,
    )
    sys.modules["__main__"] = module
    code = loader.get_code(spec.name)
    if code is None:
        raise ModuleNotFoundError(f"module {name!r} has no code", name=name)
    exec(code, module.__dict__)
