"""A log's lines without what others have put around them.

Covers: colours, the time stamps and names that launchers, containers and schedulers
put before a line, lines wrapped in JSON, which rank a line is of, which lines are a
program's source rather than its words. Does not cover: what a line means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["LONGEST", "Line", "lines", "unwrapped"]

#: Of a line. What says that an allocation failed says it early, and searching in some
#: of the forms takes time that grows with the square of a line's length.
LONGEST = 4096

_colour = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_control = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ufeff\u200b-\u200f]")
_DAY = r"\d{4}[-/.]\d\d[-/.]\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = r"(?:Z|UTC| ?[+-]\d\d:?\d\d)?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_LEVEL = r"(?:DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# One at a time, each only at the line's start: linear in its length.
_prefix = re.compile(
    "|".join(
        (
            rf"[\[(]?{_DAY}[T ]{_TIME}{_ZONE}[\])]?:?[ \t]+",
            rf"[\[(]?{_TIME}[\])]?:?[ \t]+",
            # syslog and the journal, with the host and the program
            rf"(?:<\d{{1,3}}>)?{_MONTH} [ \d]\d {_TIME} [\w.-]{{1,64}} "
            r"[\w./@-]{1,64}(?:\[\d{1,9}\])?: ",
            r"\[ *\d{1,9}\.\d{3,9}\] (?:\[ *[TC]?\d{1,9}\] )?",  # the kernel
            r"(?:stdout|stderr) [FP] ",  # a container runtime
            # MPI, Gloo, torchrun: "[1,0]<stderr>:", "[rank3]: ", "[default0]:"
            r"\[(?P<rank>(?:rank ?|default|worker[-_ ]?)?\d{1,5}(?:,\d{1,5})?)\]"
            r"(?:<std(?:out|err)>)?:? ?(?=\D|$)",
            r"(?P<task>\d{1,5}): (?=\D|\d{4}-)",  # srun --label
            # Python's logging and its kin: "- trainer - ERROR - ", "| ERROR | a:b:7 - "
            rf"[-|] (?:[\w.]{{1,64}} [-|] )?{_LEVEL} {{1,8}}[-|] "
            r"(?:[\w.:<>]{1,99} - )?",
            r"[\w ./()-]{1,40}\t[\w ./()-]{1,40}\t(?=\d)",  # GitHub's runner
            r"[\w./-]{1,64} {0,20}\| ",  # docker compose
            # kubectl logs --prefix, stern
            r"\[pod/[\w./-]{1,128}\] ",
            r"\([\w. ]{0,64}(?:pid=\d{1,9})[\w .=,:]{0,64}\) ",  # Ray
            rf"\[?{_LEVEL}\]?(?::[\w.]{{1,64}})?(?: ?[:|-])? ?(?=\S)",
            r"\(EngineCore[\w =,]{0,40}\) ",
        )
    )
)
_MOST_PREFIXES = 8
_WORDS_OF_JSON = ("log", "message", "msg", "text", "textPayload", "MESSAGE", "line")
_source = re.compile(
    # "self.x(...)", "raise X(...)", "except X:" and the like, and carets under them.
    r"(?:except\b.*:|raise\b|if\b.*:|elif\b.*:|while\b.*:|return\b|assert\b|import\b"
    r"|from\s+[\w.]+\s+import\b|def\b|class\b|with\b.*:|for\b.*\bin\b.*:|try:|@\w"
    r"|#|//|print\(|log(?:ger|ging)?\.\w+\(|self\.|\^+$|[\w.\[\]]+ [-+*/]?= \S"
    r"|\"{3}|'{3})"
)
# HDF5 and debuggers number the frames of their traces: "#003: H5Z.c line 7: why".
_comment = re.compile(r"#(?!\d)|//|except |raise ")
_frame = re.compile(r'(?:File "[^"]{0,512}", line \d|.{0,256}\.py:\d{1,6}: in )')


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        number: its place, from 0.
        text: without prefixes, blanks around it and colours.
        rank: of whom it is, as the launcher wrote it; "" if it wrote nothing.
        source: it is a line of a program that a traceback shows.
    """

    number: int
    text: str
    rank: str = ""
    source: bool = False


def lines(text: str) -> list[Line]:
    """The lines of a text, those without a word left out."""
    found: list[Line] = []
    after_frame: dict[str, bool] = {}
    for number, raw in enumerate(_split(text)):
        bare = _control.sub("", _colour.sub("", raw[:LONGEST]))
        body, rank = _without_prefixes(bare)
        clean = body.strip()
        if not clean:
            continue
        frame = _frame.match(clean) is not None
        quoted = after_frame.get(rank, False)
        source = not frame and quoted and _source.match(clean) is not None
        source = source or _comment.match(clean) is not None
        after_frame[rank] = frame
        found.append(Line(number, clean, rank, source))
    return found


_WIDTHS = range(40, 401)  # of terminals, mail programs and log viewers
_USUAL_WIDTHS = frozenset({72, 76, 78, 79, 80, 99, 100, 120, 128, 132, 140, 160, 200})
_ALIKE = 6
_part = 0.3  # of the width: a line that ends before it was not wrapped
# What no wrapped line goes on with.
_begins = re.compile(
    r'[IWEF]\d{4} \d\d:|[IWEF] \w|Traceback \(most|  File "|\t|\[\['
    r"|(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Warning)(?::|$)"
    r"|(?i:epoch|step)\b"
    r"|If the cause is memory|Current allocation summary|Hint: "
)


def unwrapped(text: str) -> str | None:
    """The text with its lines put together, where something has wrapped them.

    None where it does not look so. Guessed from the lengths, so it may be wrong:
    whoever asks should see whether the outcome says more than the text as it was.
    """
    rows = text.splitlines()
    width = max(map(len, rows), default=0)
    if width not in _WIDTHS:
        return None
    # Lines that begin alike are one logger's, of one length by chance.
    full = {row[:_ALIKE] for row in rows if len(row) == width}
    put: list[str] = []
    hard = len(full) > 1 or width in _USUAL_WIDTHS
    joins = soft = 0
    end, before = 0, ""  # of the row above
    for row in rows:
        word = row.split(maxsplit=1)[0] if row.split() else ""
        # Lines of one logger begin alike.
        alike = row[:_ALIKE] == before
        begins = not word or alike or _begins.match(row) or _prefix.match(row)
        if put and not begins and hard and end == width:
            put[-1] += row
            joins += 1
        elif put and not begins and _part * width <= end >= width - len(word):
            put[-1] += " " + row
            soft += 1
        else:
            put.append(row)
        end, before = len(row), row[:_ALIKE]
    # One line that ends near the width does so by chance.
    return "\n".join(put) if joins or soft > 1 else None


def _split(text: str) -> Iterator[str]:
    for raw in text.splitlines():
        words = raw.lstrip()
        if not (words.startswith("{") and words.rstrip().endswith("}")):
            yield raw
            continue
        yield from _from_json(raw)


def _from_json(raw: str) -> list[str]:
    """What a line of JSON, as container runtimes and loggers write it, has to say."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return [raw]
    if not isinstance(value, dict):
        return [raw]
    said = [value[word] for word in _WORDS_OF_JSON if isinstance(value.get(word), str)]
    more = value.get("exc_info") or value.get("exception") or value.get("stack_trace")
    if isinstance(more, str):
        said.append(more)
    return [line for text in said for line in text.splitlines()] or [raw]


def _without_prefixes(line: str) -> tuple[str, str]:
    rank = ""
    for _ in range(_MOST_PREFIXES):
        match = _prefix.match(line)
        if match is None:
            return line, rank
        rank = match["rank"] or match["task"] or rank
        line = line[match.end() :]
    return line, rank
