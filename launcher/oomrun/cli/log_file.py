"""Reading anybody's log, however large, in bounded memory and time.

Covers: the end of a log as it is, and from all before it the lines with a word of what
we look for. Does not cover: what they mean (``core.judging``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from oomrun.core.log_forms_translated import TRANSLATED_EXHAUSTIONS

__all__ = ["Excerpt", "excerpt", "excerpt_of"]

_CHUNK = 2**20
_TAIL = 256 * 2**10
_KEPT = 128 * 2**10
_FIRST = 32 * 2**10
_LINES_AROUND = 3
_LONGEST_LINE = 8192
_MOST_IN_A_CHUNK = 64
_SAMPLE = 64 * 2**10
_MOST_CONTROL = 0.08
_MOST_ZEROS = 0.002
# One of them is in most that says that memory, or a disk, ran out. Searching for words
# is nearly as fast as reading; matching the forms of all lines is not.
_ENGLISH = (
    b"ut of memory", b"ut of Memory", b"UT_OF_MEMORY", b"ut-of-memory", b"OOM",
    b"oom-kill", b"oom_kill", b"EXHAUSTED", b"xhausted", b"MemoryError", b"bad_alloc",
    b"ALLOC_FAILED", b"llocate memory", b"No space left", b"Killed process",
    b"[Errno ", b"aging file is", b"able to alloc",
)  # fmt: skip
_TRANSLATED = tuple(word.encode() for word in TRANSLATED_EXHAUSTIONS)
_WORDS = (*_ENGLISH, *filter(bytes.isascii, _TRANSLATED))
_WITH_LETTERS = tuple(word for word in _TRANSLATED if not word.isascii())
# In UTF-8 all bytes but the first of a letter that English lacks. The bars that show
# progress begin with E2.
_NO_LETTER = bytes(
    byte for byte in range(256) if byte == 0xE2 or not 0xC3 <= byte <= 0xED
)
_COMPRESSED = {
    b"\x1f\x8b": "gzip -dc", b"\x28\xb5\x2f\xfd": "zstd -dc", b"BZh": "bzip2 -dc",
    b"\xfd7zXZ": "xz -dc", b"PK\x03\x04": "unzip -p",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """What is worth reading of a log.

    Attributes:
        text: its end, with the lines of interest from before.
        size_bytes: of the whole log.
        problem: why it cannot be read, with what to do; "" if it can.
    """

    text: str
    size_bytes: int
    problem: str = ""


def excerpt_of(text: str) -> str:
    """The same of a text that is in memory."""
    if len(text) <= _TAIL:
        return text
    raw = text.encode("utf-8", "replace")
    return _excerpt(raw[at : at + _CHUNK] for at in range(0, len(raw), _CHUNK)).text


def excerpt(stream: BinaryIO) -> Excerpt:
    """Reads a log to its end.

    Raises:
        OSError: it cannot be read.
    """
    return _excerpt(iter(lambda: stream.read(_CHUNK), b""))


def _excerpt(chunks: Iterator[bytes]) -> Excerpt:
    start = next(chunks, b"")
    problem = _problem(start[:_SAMPLE])
    if problem:
        return Excerpt(text="", size_bytes=len(start), problem=problem)
    wide = _wide_encoding(start)
    first: list[bytes] = []
    last: deque[bytes] = deque()
    sizes = [0, 0]  # of the two
    tail, total = start, len(start)
    for chunk in chunks:
        total += len(chunk)
        tail += chunk
        if len(tail) <= _TAIL + _CHUNK:
            continue
        # Cut at a line's end, so that none is torn; where there is none, anywhere.
        at = tail.rfind(b"\n", 0, len(tail) - _TAIL) + 1 or len(tail) - _TAIL
        _keep(tail[:at], first, last, sizes)
        tail = tail[at:]
    if len(tail) > _TAIL:
        at = tail.find(b"\n", len(tail) - _TAIL) + 1 or len(tail) - _TAIL
        _keep(tail[:at], first, last, sizes)
        tail = tail[at:]
    text = b"\n".join((*first, *last, tail)).decode(wide or "utf-8", "replace")
    return Excerpt(text=text, size_bytes=total)


def _keep(
    part: bytes, first: list[bytes], last: deque[bytes], sizes: list[int]
) -> None:
    """Keeps the lines of interest: the first of the log, and the last."""
    for lines in _of_interest(part):
        if sizes[0] < _FIRST:
            first.append(lines)
            sizes[0] += len(lines)
            continue
        last.append(lines)
        sizes[1] += len(lines)
        while sizes[1] > _KEPT:
            sizes[1] -= len(last.popleft())


def _of_interest(part: bytes) -> Iterator[bytes]:
    words = _WORDS
    if not part.isascii() and part.translate(None, _NO_LETTER):
        words = (*words, *_WITH_LETTERS)
    spots = sorted(spot for word in words if word in part for spot in _all(word, part))
    done = -1
    for spot in spots:
        if spot < done:
            continue
        start = max(part.rfind(b"\n", 0, spot) + 1, spot - _LONGEST_LINE)
        end = spot
        for _ in range(_LINES_AROUND):
            found = part.find(b"\n", end + 1, spot + _LONGEST_LINE)
            if found < 0:
                break
            end = found
        if end == spot:
            end = min(len(part), spot + _LONGEST_LINE)
        yield part[start:end]
        done = end


def _all(word: bytes, part: bytes) -> Iterator[int]:
    """Where the word is: its first places in this part, and its last."""
    at, found = part.find(word), 0
    while at >= 0 and found < _MOST_IN_A_CHUNK:
        yield at
        found += 1
        at = part.find(word, at + 1)
    end = len(part)
    for _ in range(_MOST_IN_A_CHUNK):
        end = part.rfind(word, 0, end)
        if end < at or at < 0:
            return
        yield end


def _problem(start: bytes) -> str:
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic):
            return f"it is compressed: {command} LOG | oomrun diagnose -"
    if _wide_encoding(start):
        return ""
    start = start.lstrip(b"\0")  # a log that was cut off while it was written
    odd = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in start)
    if odd > _MOST_CONTROL * len(start) or start.count(0) > _MOST_ZEROS * len(start):
        return "it is binary, not a log"
    return ""


def _wide_encoding(start: bytes) -> str:
    return "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
