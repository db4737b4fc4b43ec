"""What a command is told: templates in its words, variables, and which micro-batches.

Covers: ``{micro_batch}`` and its like in arguments and ``env``; the environment
variables with the same values; the micro-batches a program can be asked for.
Does not cover: reading the job file, starting anything.

A program accumulates gradients by itself, and over whole micro-batches only, as nearly
all do. So a command's micro-batch always divides the global batch: otherwise the
program would train on fewer or more samples a step than the job file says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomrun.core.plan import Plan

__all__ = [
    "EXIT_OUT_OF_MEMORY",
    "EXIT_STOPPED",
    "MICRO_BATCH",
    "NAMES",
    "TOLD",
    "divisor",
    "divisors_around",
    "fill",
    "mistakes",
    "names",
    "values",
    "variables",
]

#: How a program may say that device memory ran out, where its output does not.
EXIT_OUT_OF_MEMORY = 79
#: How a program says that it was stopped and can go on (sysexits' EX_TEMPFAIL).
EXIT_STOPPED = 75

MICRO_BATCH = "micro_batch"
#: What may stand in braces, and the environment variable with the same value.
NAMES: Mapping[str, str] = {
    MICRO_BATCH: "OOMRUN_MICRO_BATCH",
    "global_batch": "OOMRUN_GLOBAL_BATCH",
    "accumulation_steps": "OOMRUN_ACCUMULATION_STEPS",
}
_ATTEMPT = "OOMRUN_ATTEMPT"
_CHECKPOINT_DIR = "OOMRUN_CHECKPOINT_DIR"
#: Every variable that a program is told something by.
TOLD = frozenset({*NAMES.values(), _ATTEMPT, _CHECKPOINT_DIR})

_brace = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def names(text: str) -> Iterator[str]:
    """The names in braces, known or not, in their order."""
    for match in _brace.finditer(text):
        if match.group(1) is not None:
            yield match.group(1)


def mistakes(text: str) -> Iterator[str]:
    """What is no template: unknown names in braces, and braces that stand alone."""
    for match in _brace.finditer(text):
        name = match.group(1)
        alone = name is None and len(match.group()) == 1
        if alone or (name is not None and name not in NAMES):
            yield match.group()


def fill(text: str, known: Mapping[str, int]) -> str:
    """``text`` with its templates filled in; ``{{`` and ``}}`` stand for braces.

    Raises:
        KeyError: a name has no value.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        return match.group()[0] if name is None else str(known[name])

    return _brace.sub(value, text)


def values(plan: Plan) -> dict[str, int]:
    """The plan's values by name; none where the job file tells no global batch."""
    (device,) = plan.devices
    steps = device.accumulation_steps
    if plan.global_batch_size is None or device.micro_batch_size is None or not steps:
        return {}
    numbers = (device.micro_batch_size, plan.global_batch_size, steps)
    return dict(zip(NAMES, numbers, strict=True))


def variables(plan: Plan, attempt: int, checkpoint_dir: str) -> dict[str, str]:
    """The environment variables that a program can read the same values from."""
    numbers = {NAMES[name]: str(value) for name, value in values(plan).items()}
    return {**numbers, _ATTEMPT: str(attempt), _CHECKPOINT_DIR: checkpoint_dir}


def divisor(whole: int, at_most: int) -> int:
    """The largest divisor of ``whole`` that is not above ``at_most`` (at least 1)."""
    return max((n for n in _divisors(whole) if n <= at_most), default=1)


def divisors_around(whole: int, size: int) -> tuple[int, int]:
    """The largest divisor below or at ``size``, and the smallest at or above."""
    return divisor(whole, size), min(n for n in _divisors(whole) if n >= size)


def _divisors(whole: int) -> set[int]:
    small = [n for n in range(1, int(whole**0.5) + 1) if whole % n == 0]
    return {*small, *(whole // n for n in small)}
