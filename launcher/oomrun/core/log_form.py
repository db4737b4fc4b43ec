"""The forms in which programs say that something ran out, and what only looks so.

Rows of tables: each form has a kind, a role and a pattern of a line. The tables are in
``log_forms_*``, their order in ``log_forms``.

The roles:

- an *error* says by itself that this kind of thing ran out;
- a *hint* may be that or harmless: it counts if nothing shows that the program went on;
- a *status* has many causes: memory is the likely one, and sure where another line
  shows a shortage;
- a *harmless* line is of an allocation that may fail;
- *killed* says that a signal ended a process, not why;
- *kernel* is the kernel's own log of an OOM kill, of whichever process;
- *other* is a failure that has nothing to do with memory, whatever words it uses.

All patterns are linear in the line: no repetition within a repetition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["EXHAUSTED", "Form", "Kind", "Role", "form", "pieces"]

Kind = Literal[
    "gpu_allocator", "gpu_context", "gpu_library", "gpu_async_allocator", "xla",
    "host_allocator", "host_killed", "nccl", "shm", "disk", "protobuf_limit", "grpc",
    "device_fault", "peer_lost", "hang", "preemption", "misconfiguration", "crash",
    "threads", "hardware", "no_capacity",
]  # fmt: skip
Role = Literal[
    "error", "hint", "status", "harmless", "killed", "kernel", "other"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """One row: which kind of failure, how sure, and what the line looks like."""

    kind: Kind
    role: Role
    pattern: re.Pattern[str]


def form(kind: Kind, role: Role, *patterns: str) -> Form:
    """A row of a table; any of the patterns makes it."""
    return Form(kind, role, re.compile("|".join(f"(?:{p})" for p in patterns)))


# What of a pattern does not stand for itself, or need not be there.
_group = re.compile(r"\([^()]*\)\??")
_no_literal = re.compile(r"\[[^]]*\][?*+]?|\\b|.\?")


def pieces(pattern: str) -> tuple[str, ...]:
    """For each of a pattern's alternatives its longest piece of plain text.

    Whatever the pattern matches has one of them in it. For patterns of words, classes
    of characters and what is optional; the groups within may be no more than two deep.
    """
    for _ in range(2):
        pattern = _group.sub("\0", pattern)
    plain = (_no_literal.sub("\0", each) for each in pattern.split("|"))
    return tuple(max(each.split("\0"), key=len) for each in plain)


#: What TensorFlow and gRPC put before the words of this status.
EXHAUSTED = (
    r"(?:Resource exhausted|RESOURCE_EXHAUSTED|ResourceExhaustedError"
    r"|StatusCode\.RESOURCE_EXHAUSTED)(?: \(see above for traceback\))?"
    r"(?: \[Op:\w{1,80}\])?: {0,3}(?:\{\{[^}]{0,400}\}\} ?)?"
)
