"""The door to NVML: opened late, for a bounded time, with every failure put into words.

Covers: loading pynvml (the PyPI package nvidia-ml-py), the NVML session, a limit on how
long a hanging driver can hold us, and plain words for NVML's errors.
Does not cover: what is read through the door (``oomrun.devices.gpu``).

pynvml is not typed, so it is ``Any`` here, and only here and in ``gpu``.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# NVML error number -> what it means to somebody who wants to train. Numbers, since
# pynvml may be the very thing that is missing.
_PLAIN_WORDS = {
    3: "the driver does not support this",
    4: "no permission to ask the driver; in a container, are /dev/nvidia* passed in?",
    6: "it is not there any more",
    9: "the NVIDIA kernel driver is not loaded (modprobe nvidia; see dmesg)",
    12: "no NVIDIA driver: libnvidia-ml.so.1 was not found (a container needs the "
    "NVIDIA runtime, as with --gpus all)",
    13: "the driver is too old for this call",
    15: "the GPU is lost: it has fallen off the bus or failed; it needs a reset or a "
    "reboot (see Xid lines in dmesg)",
    16: "the GPU needs a reset before it can be used again",
    17: "the operating system blocked the request",
    18: "the NVIDIA driver in the kernel and the library on disk are of different "
    "versions, as after an update: reboot, or reload the kernel module",
    20: "the driver itself is out of memory",
    28: "the GPU is not reachable: it has fallen off the bus or is not powered",
    999: "the driver says 'unknown error' (see dmesg)",
}


class NvmlUnavailableError(Exception):
    """NVML as a whole cannot be asked; the text says why, in plain words."""


def words(error: BaseException) -> str:
    """What an error from pynvml means, in plain words, with NVML's own number."""
    number = getattr(error, "value", None)
    if isinstance(number, int):
        return f"{_PLAIN_WORDS.get(number, str(error))} [NVML error {number}]"
    return f"{error or 'no further word'} [{type(error).__name__}]"


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """The pynvml module with NVML initialised; sessions may nest.

    Opening costs up to seconds when no other process keeps the driver awake: see
    ``held_open`` for repeated readings.

    Raises:
        NvmlUnavailableError: There is no NVML to ask.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except Exception as error:  # a broken install can raise anything at import
        raise NvmlUnavailableError(
            f"cannot ask for GPUs: the Python package nvidia-ml-py does not load: "
            f"{words(error)}"
        ) from error
    try:
        pynvml.nvmlInit()
    except Exception as error:
        raise NvmlUnavailableError(words(error)) from error
    try:
        yield pynvml
    finally:
        # A driver that went away in between also fails the shutdown: nothing is lost.
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def ask(pynvml: Any, name: str, *arguments: Any) -> Any | None:
    """What one NVML call answers, or None where the driver has no answer.

    Args:
        name: The call's name without its ``nvml``.
    """
    try:
        return getattr(pynvml, f"nvml{name}")(*arguments)
    except Exception:  # pynvml's own errors, and AttributeError where it lacks a call
        return None


# The call that did not come back. NVML calls cannot be cancelled, and a second one
# would hang as well, so until it returns everybody is told so at once.
_hanging: threading.Thread | None = None


def within(timeout_s: float, function: Callable[[], T]) -> T:
    """What the function returns or raises, if it does so within ``timeout_s``.

    It runs in a daemon thread, which is left behind when the driver hangs.

    Raises:
        NvmlUnavailableError: It took longer, or an earlier call still hangs.
    """
    global _hanging
    if _hanging is not None and _hanging.is_alive():
        raise NvmlUnavailableError("the NVIDIA driver still hangs in an earlier call")
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="oomrun-nvml", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    _hanging = thread
    raise NvmlUnavailableError(
        f"the NVIDIA driver did not answer within {timeout_s:g} s "
        "(does nvidia-smi hang too?)"
    )


@contextlib.contextmanager
def held_open(timeout_s: float) -> Iterator[None]:
    """NVML kept open, where there is one, so that the readings inside are quick."""
    held = contextlib.ExitStack()
    with contextlib.suppress(Exception):
        within(timeout_s, lambda: held.enter_context(session()))
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            within(timeout_s, held.close)
