"""Reading a log: which of its lines say what went wrong, and which of them decides.

Covers: matching the forms of ``log_forms``, lines that were wrapped, whether the
program went on after a line, the facts around the one that decides. Does not cover:
what exit codes and counters add to it (``judging``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oomrun.core.log_facts import Facts, facts_of, together
from oomrun.core.log_form import Form, Kind
from oomrun.core.log_forms import FORMS, MAY_MATTER
from oomrun.core.log_lines import Line, lines, unwrapped

__all__ = ["DEVICE_KINDS", "MEMORY_KINDS", "Hit", "Reading", "read"]

DEVICE_KINDS: frozenset[Kind] = frozenset(
    {
        "gpu_allocator", "gpu_context", "gpu_library", "gpu_async_allocator", "xla",
        "nccl",
    }
)  # fmt: skip
MEMORY_KINDS: frozenset[Kind] = DEVICE_KINDS | {"host_allocator", "host_killed", "shm"}

_went_on = re.compile(
    r"(?:\b|_)loss\b\W{0,3}\d|\bit/s\b|\ds/it\b|\bms/step\b|\bsamples/s(?:ec)?\b"
    r"|\btrial \d+ finished with value",
    re.IGNORECASE,
)
_counts = re.compile(r"\b(?:epoch|step|iter(?:ation)?|eta|batch)\b\W{0,3}\d", re.I)
# A step that is named since it failed was not taken.
_not_taken = re.compile(
    r"\b(?:fail\w*|abort\w*|crash\w*|interrupt\w*|raised|died|emergency|killed|oom"
    r"|does(?: not|n't) fit|too (?:large|big)|g[ai]ve up|stopped at)\b"
    r"|\w(?:Error|Exception)\b",
    re.IGNORECASE,
)
# They name steps that are no steps of a training.
_schedulers = re.compile(r"^(?:slurmstepd|srun|sbatch|prolog|epilog)\b|\bStepId=")
_names_shm = re.compile(
    r"/dev/shm|shared_memory|SharedMemory|\bshm_open|multiprocessing\b.*\bshm"
)
_names_rpc = re.compile(r"\bStatusCode\.RESOURCE_EXHAUSTED\b")
_NEAR = 8
_OF_A_CALL = 3


@dataclass(frozen=True, slots=True)
class Hit:
    """A line of one of the forms; ``text`` is the line, or those it was wrapped to."""

    line: Line
    form: Form
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a log says.

    Attributes:
        hits: the lines that matter, in their order.
        progress: (number, rank) of lines that show that a training moves.
        near_shm: numbers of lines near one that names shared memory.
        of_rpc: numbers of lines of a call whose status gRPC tells.
    """

    hits: tuple[Hit, ...]
    progress: tuple[tuple[int, str], ...] = ()
    near_shm: frozenset[int] = frozenset()
    of_rpc: frozenset[int] = frozenset()

    def went_on_after(self, hit: Hit) -> bool:
        """Whether whoever printed the line trained on after it."""
        rank = hit.line.rank
        return any(
            number > hit.line.number and (not rank or rank == of)
            for number, of in self.progress
        )

    def crashed_after(self, hit: Hit, but: Kind | None = None) -> bool:
        """Whether something else, not of kind ``but``, failed after it had gone on."""
        since = [n for n, _ in self.progress if n > hit.line.number]
        return bool(since) and any(
            other.form.role in ("other", "error")
            and other.form.kind != but
            # The same again, as the exception that a line of the log told before.
            and (other.form.kind != "crash" or "ResourceExhausted" not in other.text)
            and other.line.number > since[0]
            for other in self.hits
        )

    def facts(self, hit: Hit, kinds: Iterable[Kind]) -> Facts:
        """What is said of the failure that ``hit`` tells, by it and the lines around.

        The hit first, then the lines of these kinds before it, the nearest first, then
        those after it: an exception comes after the allocator's own words.
        """
        wanted = frozenset(kinds)
        alike = [
            other for other in self.hits
            if other is not hit
            and other.form.kind in wanted
            and other.form.role in ("error", "hint", "harmless")
            and (other.form.role != "harmless" or hit.form.role == "harmless")
            and (other.line.rank == hit.line.rank)
        ]  # fmt: skip
        before = [o for o in alike if o.line.number < hit.line.number]
        after = [o for o in alike if o.line.number > hit.line.number]
        found = facts_of(hit.text)
        for other in (*reversed(before), *after):
            found = together(found, facts_of(other.text))
        return found

    def first_of_ladder(self, hit: Hit) -> Hit:
        """The first of lines like this one in a row: the size that was wanted."""
        first = hit
        for other in reversed(self.hits):
            if other.line.number < first.line.number and other.form is hit.form:
                first = other
        return first


def read(text: str) -> Reading:
    """Reads a log; lines that something has wrapped are put together."""
    plain = _read(text)
    whole = unwrapped(text)
    if whole is None:
        return plain
    put = _read(whole)
    # A guess that joined lines which belong apart finds nothing new.
    known = {(hit.form, facts_of(hit.text)) for hit in plain.hits}
    new = any(
        hit.form.role != "other" and (hit.form, facts_of(hit.text)) not in known
        for hit in put.hits
    )
    return put if new else plain


def _read(text: str) -> Reading:
    found = lines(text)
    hits: list[Hit] = []
    progress: list[tuple[int, str]] = []
    near_shm: set[int] = set()
    of_rpc: set[int] = set()
    skip_until = 0
    for index, line in enumerate(found):
        if _names_shm.search(line.text):
            near_shm.update(range(line.number, line.number + _NEAR))
        if _names_rpc.search(line.text):
            of_rpc.update(range(line.number, line.number + _OF_A_CALL))
        if line.source or index < skip_until:
            continue
        form = _form_of(line.text)
        if form is not None:
            hit, used = _whole(found, index, form)
            hits.append(hit)
            skip_until = index + used
        elif _moves(line.text):
            progress.append((line.number, line.rank))
    return Reading(tuple(hits), tuple(progress), frozenset(near_shm), frozenset(of_rpc))


def _moves(text: str) -> bool:
    """Whether a line shows that a training moves."""
    if _schedulers.search(text):
        return False
    if _went_on.search(text):
        return True
    return _counts.search(text) is not None and not _not_taken.search(text)


_belongs = re.compile(r"^(?:E )?\s*\[\[|^Detected at node \S")


def _whole(found: Sequence[Line], index: int, form: Form) -> tuple[Hit, int]:
    """The line with those that only say at which node, and how many they are."""
    line, text, used = found[index], found[index].text, 1
    for other in found[index + 1 : index + 3]:
        if not _belongs.match(other.text) or other.rank != line.rank:
            break
        text, used = f"{text} {other.text}", used + 1
    return Hit(line, form, text), used


# TensorFlow's and XLA's allocators list every chunk they have: thousands of lines.
_of_a_dump = re.compile(
    r"\] (?:InUse|Free|Chunk|Next region|Bin \(|Sum Total|  Size:|\d+ Chunks of size)"
)


def _form_of(text: str) -> Form | None:
    if _of_a_dump.search(text, 0, 200) or not MAY_MATTER.search(text):
        return None
    return next((form for form in FORMS if form.pattern.search(text)), None)
