"""Python values and code as nested lists of text: equal only where they do the same.

Covers: plain data, containers, objects, and functions by their bytecode with all that
they read: globals, closures, defaults, methods and attributes by name. Code of the
user's is looked into; that of an installed library is known by its name and version.
Does not cover: what Keras and TensorFlow make (``model_key.py``).

Two values that differ may only get one description where the difference is a name, a
comment, or a number in a large array. Where nothing certain can be said, it is said:
``Unkeyable``.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import logging
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from oomrun.worker.ownership import (
    Unkeyable,
    check_repeatable,
    content,
    is_own,
    is_own_class,
    is_own_code,
    is_own_module,
    version,
)

__all__ = ["Describer"]

_MOST_VALUES = 200_000
_PLAIN = frozenset(
    {bool, bytearray, bytes, complex, float, int, range, str, type(...), type(None)}
)
_LARGEST_ARRAY = 1024

_UNKNOWABLE_BUILTINS = frozenset(
    {
        "__import__", "compile", "delattr", "eval", "exec", "globals", "hash", "id",
        "input", "locals", "open",
    }
)  # fmt: skip
# Whoever uses these may read attributes whose names are not in the code.
_BY_NAME = frozenset(
    {"__dict__", "__getattribute__", "attrgetter", "dir", "getattr", "getmembers",
     "hasattr", "methodcaller", "setattr", "vars"}
)  # fmt: skip
_UNKNOWABLE_NAMES = frozenset({"numpy_function", "py_func", "py_function"})
# Attributes that name things, and those that Keras fills in once a model is trained.
_NAMING = frozenset(
    {"__doc__", "__module__", "__name__", "__qualname__", "__signature__", "_name",
     "_path", "_seed", "history", "name", "path", "predict_function", "seed",
     "stop_training", "test_function", "train_function"}
)  # fmt: skip
_CLASS_NAMING = frozenset(
    {
        "__annotate__", "__annotate_func__", "__annotations__", "__dict__", "__doc__",
        "__firstlineno__", "__init__", "__init_subclass__", "__module__", "__new__",
        "__parameters__", "__qualname__", "__repr__", "__slots__", "__str__",
        "__staticattributes__", "__weakref__", "__abstractmethods__", "_abc_impl",
        "__orig_bases__", "__annotations_cache__", "__match_args__", "__hash__",
        "__dataclass_fields__", "__dataclass_params__", "__eq__", "__replace__",
    }
)  # fmt: skip


class Describer:
    """Describes values, each object once.

    Methods and attributes of the user's objects count where their names are read by
    code that was described. So that takes several rounds: the names that the last one
    has ``used`` are what the next one is given, until there are no more.

    Args:
        names: the names that may be read.
        special: describes what it knows, and gives None for anything else.
        harmless: methods that a library may call, but not in a step.
    """

    def __init__(
        self,
        names: frozenset[str],
        special: Callable[[Describer, Any], Any],
        harmless: frozenset[str],
    ) -> None:
        self.used: set[str] = set()
        self._names, self._special, self._harmless = names, special, harmless
        self._everything = not names.isdisjoint(_BY_NAME)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self._count = 0

    def value(self, value: Any) -> Any:
        """The description of any value."""
        self._count += 1
        if self._count > _MOST_VALUES:
            raise Unkeyable("too much belongs to it")
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if type(value) is tuple:
            return ["tuple", *map(self.value, value)]
        if id(value) in self._seen:
            return ["again", str(self._seen[id(value)])]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        found = self._special(self, value)
        return self._any(value) if found is None else found

    def _any(self, value: Any) -> Any:
        match value:
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return ["method", *map(self.value, (value.__func__, value.__self__))]
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                return self._builtin(value)
            case types.ModuleType():
                return self._module(value)
            case types.CodeType():
                return self.code(value, {})
            case type():
                return self._class(value)
            case functools.partial():
                return ["partial", *map(self.value, (
                    value.func, value.args, value.keywords))]  # fmt: skip
            case staticmethod() | classmethod():
                return [type(value).__name__, self.value(value.__func__)]
            case property():
                return ["property", *map(self.value, (value.fget, value.fset))]
            case functools.cached_property():
                return ["property", self.value(value.func)]
            case enum.Enum():
                return ["enum", type(value).__qualname__, str(value.name),
                        self.value(value.value)]  # fmt: skip
            case np.ndarray() | np.generic():
                return self._array(np.asarray(value))
            case np.dtype():
                return ["dtype", str(value)]
            case logging.Logger():
                return ["logger"]
            case re.Pattern():
                return ["pattern", repr(value.pattern), str(value.flags)]
            case weakref.ReferenceType():
                return ["weakref", self.value(value())]
            case str() | int() | float():
                return [type(value).__qualname__, repr(value), *self._extra(value)]
            case dict() | types.MappingProxyType():
                return ["dict", *self._extra(value), *(
                    [self.value(k), self.value(v)] for k, v in value.items()
                )]  # fmt: skip
            case list() | tuple() | deque():
                return ["list", *self._extra(value), *map(self.value, value)]
            case set() | frozenset():
                # Of plain values, whose order changes from run to run.
                items = sorted(self._plain(item) for item in value)
                return ["set", *self._extra(value), *items]
            case types.GenericAlias() | types.UnionType():
                return ["type", str(value)]
        return ["object", self.value(type(value)), *self.attributes(value)]

    def _plain(self, value: Any) -> str:
        if not isinstance(value, bool | int | float | str | bytes | tuple | None):
            raise Unkeyable(f"a set of {type(value).__name__}")
        return repr(value)

    def _extra(self, container: Any) -> list[Any]:
        """What a container of a class of the user's is beside its items."""
        cls = type(container)
        if not is_own_class(cls):
            return []
        return [self.value(cls), *self.attributes(container)]

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject:
            raise Unkeyable("an array of objects")
        facts = ["array", str(array.dtype), str(array.shape)]
        if array.nbytes > _LARGEST_ARRAY:
            return facts  # data: what it is does not decide what is done with it
        return [*facts, repr(array.tolist())]

    # -- objects ---------------------------------------------------------------

    def attributes(self, value: Any) -> list[Any]:
        """The attributes of an object that described code may read."""
        bag = isinstance(value, argparse.Namespace | types.SimpleNamespace)
        own = bag or is_own_class(type(value))
        found = dict(attributes(value))
        if not found and not own:
            raise Unkeyable(f"a {type(value).__module__}.{type(value).__qualname__}")
        return [
            [name, self.value(found[name])]
            for name in sorted(found)
            if name not in _NAMING and (not own or self._reads(name))
        ]

    def own_parts(self, value: Any) -> list[Any]:
        """What the user has put into an object of a library: code, and plain values."""
        parts = dict(attributes(value))
        return [
            [name, self.value(parts[name])]
            for name in sorted(parts)
            if name not in _NAMING
            if is_own(parts[name])
            or (
                type(parts[name]) in _PLAIN
                and self._reads(name)
                and not name.startswith("_")
            )
        ]

    def _reads(self, name: str) -> bool:
        return self._everything or name in self._names

    def _class(self, cls: type) -> Any:
        if not is_own_class(cls):
            check_repeatable(cls.__module__)
            patched = [
                [name, self.value(member)]
                for base in cls.__mro__
                if not is_own_class(base)
                for name, member in sorted(vars(base).items())
                if isinstance(member, types.FunctionType) and is_own(member)
            ]
            return ["class", cls.__module__, cls.__qualname__,
                    version(cls.__module__), *patched]  # fmt: skip
        library = [
            base for base in cls.__mro__[1:-1] if not is_own_class(base)
        ]  # fmt: skip
        members = [
            [name, self.value(member)]
            for name, member in sorted(vars(cls).items())
            if name not in _CLASS_NAMING and name not in self._harmless
            if self._reads(name)
            or (name.startswith("__") and name.endswith("__"))
            or any(hasattr(base, name) for base in library)
        ]
        bases = [self.value(base) for base in cls.__bases__ if base is not object]
        return ["own class", cls.__name__, bases, *members]

    def _module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if not is_own_module(module):
            check_repeatable(name)
            return ["module", name, version(name)]
        return ["own module", *(
            [item, self.value(vars(module)[item])]
            for item in sorted(vars(module))
            if self._reads(item) and not item.startswith("__")
        )]  # fmt: skip

    # -- code ------------------------------------------------------------------

    def _builtin(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            module = str(getattr(value, "__module__", None))
            check_repeatable(module)
            return ["builtin", module, value.__name__]
        return ["builtin", self.value(owner), value.__name__]

    def _function(self, function: types.FunctionType) -> Any:
        cells = [content(cell) for cell in function.__closure__ or ()]
        if not is_own_code(function.__code__):
            # A decorator says that it is the module of what it decorates.
            module = str(function.__globals__.get("__name__"))
            check_repeatable(module)
            inside = [
                self.value(cell)
                for cell in cells
                if is_own(cell)
                or isinstance(cell, bool | int | float)
                or (isinstance(cell, str) and cell != function.__module__)
            ]
            name = function.__code__.co_name
            return ["function", module, name, version(module), *inside]
        given = (function.__defaults__, function.__kwdefaults__)
        return [
            "own function",
            self.code(function.__code__, function.__globals__),
            [self.value(item) for item in (*given, *cells)],
            [[n, self.value(v)] for n, v in sorted(vars(function).items())
             if self._reads(n)],
        ]  # fmt: skip

    def code(self, code: types.CodeType, scope: Mapping[str, Any]) -> Any:
        """Code and what it reads of its globals."""
        loaded, named = _names(code)
        if not _UNKNOWABLE_NAMES.isdisjoint((*loaded, *named)):
            raise Unkeyable("code that leaves TensorFlow for Python")
        self.used.update(named)
        self.used.update(_BY_NAME.intersection(loaded))
        read: list[Any] = []
        for name in loaded:
            if name in scope:
                read.append([name, self.value(scope[name])])
            elif name in _UNKNOWABLE_BUILTINS:
                raise Unkeyable(f"code that calls {name}")
        consts = [
            self.code(const, scope) if isinstance(const, types.CodeType)
            else self.value(const)
            for const in code.co_consts
        ]  # fmt: skip
        return [
            code.co_code.hex(),
            getattr(code, "co_exceptiontable", b"").hex(),
            [str(n) for n in (code.co_argcount, code.co_posonlyargcount,
                              code.co_kwonlyargcount, code.co_flags & _FLAGS)],
            [*code.co_names], [*code.co_varnames], [*code.co_freevars],
            [*code.co_cellvars], consts, read,
        ]  # fmt: skip


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


# What kind of function it is, and not what its file imports from ``__future__``.
_FLAGS = 0x3FF
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTE = frozenset(
    {"IMPORT_FROM", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"}
)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that code reads, in order, and the attributes that it may read."""
    loaded: dict[str, None] = {}
    named: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL:
            loaded[step.argval] = None
        elif step.opname in _ATTRIBUTE:
            named.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            raise Unkeyable(f"code that imports {step.argval}")
    return tuple(loaded), frozenset({*named, *_identifiers(code.co_consts)})


def _identifiers(consts: Iterable[Any]) -> Iterator[str]:
    for const in consts:
        if isinstance(const, str) and const.isidentifier():
            yield const
        elif isinstance(const, tuple | frozenset):
            yield from _identifiers(const)
