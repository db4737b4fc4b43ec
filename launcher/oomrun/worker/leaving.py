"""Ending the worker's process at once, wherever the script is.

Covers: what has to be done all the same. Does not cover: what is told before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["leave"]

# What AutoGraph makes of a function goes into a file, removed as Python ends.
_GENERATED = "__autograph_generated_file"


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code.

    Not by an exception: a script that catches it, or whose ``finally`` saves the model,
    would go on with one that is trained half. Nor by the script's own exit handlers.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith(_GENERATED) and file:
            with contextlib.suppress(OSError):
                os.unlink(file)
    os._exit(code)
