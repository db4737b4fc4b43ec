"""What a line says of a failed allocation: device, shape, dtype and bytes.

Covers: TensorFlow, XLA, PyTorch, NumPy, NCCL, CUDA. Only what a line really says: bytes
are exact, and ``about_bytes`` is what was rounded for people. Does not cover: which
line to ask.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = [
    "Facts", "facts_of", "only_device", "script_line", "size_bytes", "together"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of one line or of several; None where nothing is said.

    ``about_bytes`` is the size as it was printed, rounded; ``operation`` the graph's
    node or operation that asked.
    """

    device: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    requested_bytes: int | None = None
    about_bytes: int | None = None
    operation: str | None = None


_AT = r"\bdevice:(?P<kind>GPU|CPU|TPU|XPU|DML|NPU|HPU):(?P<index>\d{1,4})"
_DEVICES = (
    # Where a copy was to go; the same, in the key of a rendezvous.
    re.compile(rf"\bto \S{{0,80}}{_AT}", re.I),
    re.compile(rf";[0-9a-f]{{1,16}};\S{{0,120}}{_AT}", re.I),
    # The device of the failed allocation before that of its node.
    re.compile(_AT, re.I),
    re.compile(r"\btask:\d+/(?P<kind>gpu|cpu|tpu):(?P<index>\d{1,4})", re.I),
    re.compile(r"\b(?P<kind>GPU)_(?P<index>\d{1,4})_bfc"),
    re.compile(r"\b(?P<kind>gpu)_async_(?P<index>\d{1,4})"),
    re.compile(r"\b(?P<kind>GPU|CPU|TPU):(?P<index>\d{1,4})\b"),
    re.compile(r"\bcuda:(?P<index>\d{1,4})\b", re.I),
    re.compile(r"\bon (?:GPU|device) (?P<index>\d{1,4})\b"),
    re.compile(r"\bGPU (?P<index>\d{1,4})(?: has a total|; \d)"),
    # XRT has devices of several kinds.
    re.compile(r"device ordinal (?P<index>\d{1,4})(?!.{0,200}\bXRT)"),
    re.compile(r":\d{1,9}:\d{1,9} \[(?P<index>\d{1,4})\] .{0,100}NCCL"),
)
_SHAPES = (
    re.compile(r"\bshape ?\[(?P<dims>[\d, ]{0,400})\]"),
    re.compile(r"\bshape \((?P<dims>[\d, ]{0,400})\)"),
)
_dtype = re.compile(r"\b(?:and|with) (?:data )?(?:type|dtype) ([a-z]\w{1,20})\b")
_EXACT = (
    re.compile(r"\(rounded to (\d+)\)"),
    re.compile(r"\((\d[\d,]*) ?(?:bytes|B)\)"),
    re.compile(
        r"\b[Aa]lloc\w{0,8}(?: memory)?(?: of)?(?: size)? (\d[\d,]{0,24})(?= |\b)"
        r"(?!\.\d)(?: bytes| exceeds|B\b| on host|$|:| from device)"
    ),
    re.compile(r"\b[cm]?alloc(?: async)? (\d[\d,]*) bytes"),
    re.compile(r"\ballocate buffer: (\d+)$|\bcreating buffer (\d+)\b"),
    re.compile(r"\bextend \S{1,120} to (\d+) bytes"),
    re.compile(r"\b(?:Out of memory allocating|size was) (\d+) bytes"),
    re.compile(r"\b(?:mmap|of|request(?:ed)?(?: for)?:?) (\d[\d,]*) bytes"),
    re.compile(r"\bserialize message of type \S{1,100} and size (\d+)"),
    re.compile(r"\(size (\d+)\)"),
    re.compile(r"\b(?:[mcr]e?alloc|buffer|object) of size:? (\d+)\b(?!\.\d)"),
)
_about = re.compile(
    r"(?:allocat\w{0,4}|alloc|reserve|request for|Used|size:?)(?: memory)?"
    r"(?: of)? (\d{1,9}(?:\.\d{1,6})?) ?(?P<unit>[KMGTP]i?B?|B(?:ytes)?|bytes)\b",
    re.I,
)
_UNITS = {"B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_OPERATIONS = (
    re.compile(r"requested by op (\S{1,300})"),
    re.compile(r"\{\{node (\S{1,300}?)\}\}"),
    re.compile(r"\[\[(?:node|Node:?) (\S{1,300})"),
    re.compile(r"Detected at node '?([^\s']{1,300})"),
    re.compile(r"\[Op:(\w{1,120})"),
)


def facts_of(line: str) -> Facts:
    """What a line says."""
    return Facts(
        device=_device(line),
        shape=_shape(line),
        dtype=match[1] if (match := _dtype.search(line)) else None,
        requested_bytes=_exact(line),
        about_bytes=_rounded(line),
        operation=_operation(line),
    )


def together(first: Facts, then: Facts) -> Facts:
    """What ``first`` says, and what ``then`` adds to it."""
    shape, dtype = first.shape, first.dtype
    if shape is None:
        shape, dtype = then.shape, first.dtype or then.dtype
    elif then.shape == shape:
        dtype = dtype or then.dtype
    return Facts(
        device=first.device or then.device,
        shape=shape,
        dtype=dtype,
        requested_bytes=first.requested_bytes or then.requested_bytes,
        about_bytes=first.about_bytes or then.about_bytes,
        operation=first.operation or then.operation,
    )


_DTYPE_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "float16": 2,
    "int16": 2,
    "float": 4, "float32": 4, "int32": 4, "uint32": 4, "double": 8, "float64": 8,
    "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def size_bytes(facts: Facts) -> int | None:
    """What was asked for: as the text says, else as shape and dtype make it."""
    each = _DTYPE_BYTES.get(facts.dtype or "")
    if facts.requested_bytes is None and each and facts.shape is not None:
        return each * math.prod(facts.shape)
    return facts.requested_bytes or facts.about_bytes


_frames = re.compile(r'File "([^"\n]{1,1024})", line (\d{1,9})')
_not_the_script = re.compile(
    r"site-packages|dist-packages|/oomrun/worker/|/lib/python\d|^<|__autograph_generated"
)


def script_line(text: str) -> str | None:
    """The innermost line of the user's own code in a traceback: ``train.py:12``."""
    own = [
        (path, line)
        for path, line in _frames.findall(text)
        if not _not_the_script.search(path)
    ]
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}" if own else None


_created = re.compile(rf"\b[Cc]reated (?:TensorFlow )?device \(?/\S{{0,80}}{_AT}", re.I)


def only_device(text: str) -> str | None:
    """The device that a text tells was made ready, where it is one alone."""
    found = {f"{m['kind'].upper()}:{int(m['index'])}" for m in _created.finditer(text)}
    return found.pop() if len(found) == 1 else None


def _device(line: str) -> str | None:
    for pattern in _DEVICES:
        if match := pattern.search(line):
            kind = match.groupdict().get("kind") or "GPU"
            return f"{kind.upper()}:{int(match['index'])}"
    return None


def _shape(line: str) -> tuple[int, ...] | None:
    for pattern in _SHAPES:
        if match := pattern.search(line):
            dims = [part.strip() for part in match["dims"].split(",")]
            return tuple(int(part) for part in dims if part.isdigit())
    return None


def _exact(line: str) -> int | None:
    for pattern in _EXACT:
        if match := pattern.search(line):
            return int(match[match.lastindex or 1].replace(",", ""))
    return None


def _rounded(line: str) -> int | None:
    match = _about.search(line)
    if match is None:
        return None
    return int(float(match[1]) * 1024 ** _UNITS[match["unit"][0].upper()])


def _operation(line: str) -> str | None:
    for pattern in _OPERATIONS:
        if match := pattern.search(line):
            return match[1].rstrip(".,;:]})")
    return None
