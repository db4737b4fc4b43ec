"""A loop's own numbers, kept with its checkpoints."""

from __future__ import annotations

from collections import UserDict
from typing import Any

from oomrun.worker.encoding import Unencodable, encode

__all__ = ["Values"]


class Values(UserDict[str, Any]):
    """A dictionary that takes only what a checkpoint can keep.

    These are None, booleans, numbers, strings, bytes, NumPy arrays, tensors, and lists,
    tuples, sets and dictionaries of them.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets one value.

        Raises:
            TypeError: it cannot be kept.
        """
        try:
            encode({key: value}, {}, "value")
        except Unencodable as error:
            raise TypeError(
                f"loop.values[{key!r}] cannot be kept in a checkpoint: it holds "
                f"{str(error).split(': ', 1)[-1]}. Plain numbers, texts, lists, "
                "dictionaries and arrays can; objects with variables belong into "
                "state=[...]"
            ) from None
        super().__setitem__(key, value)
