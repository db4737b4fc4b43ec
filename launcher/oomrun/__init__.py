"""oomrun: train a Keras script within the memory there is.

A script with a training loop of its own imports ``Loop``; others need nothing of this.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomrun.worker.loop import Loop

__all__ = ["Loop", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when asked for: it brings TensorFlow with it, which the command never
    # imports.
    if name == "Loop":
        return import_module("oomrun.worker.loop").Loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
