"""The names of the hosts of a job, as a job file, Slurm or an MPI hostfile writes them.

Covers: Slurm's compressed lists, the lines of a hostfile, what may be a name at all.
Does not cover: reading files and the environment (``oomrun.hosts``).
"""

from __future__ import annotations

import re

__all__ = ["HOST_PATTERN", "MOST_HOSTS", "expanded", "of_hostfile"]

#: A host's name or address, with a user before it if need be. Nothing that ssh could
#: take for an option, or a shell for more than a word.
HOST_PATTERN = r"^(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9.:_-]*$"
MOST_HOSTS = 4096


def expanded(text: str) -> tuple[str, ...]:
    """The names in a list of Slurm's, such as ``node[01-03,7],login``.

    Raises:
        ValueError: it is no such list.
    """
    names: list[str] = []
    for part in _parts(text):
        names += _expanded(part)
        if len(names) > MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
    return _checked(names)


def _parts(text: str) -> list[str]:
    """Cut at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets in {text!r} do not match")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(f"brackets in {text!r} do not match")
    return parts


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    found = []
    for piece in inside.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece, re.ASCII)
        if match is None:
            raise ValueError(f"{piece!r} in {part!r} is neither a number nor a range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise ValueError(f"{piece!r} in {part!r} is no range of hosts")
        numbers = range(int(first), int(last) + 1)
        found += [f"{before}{number:0{len(first)}d}" for number in numbers]
    return [name + tail for name in found for tail in _expanded(after)]


def of_hostfile(text: str) -> tuple[str, ...]:
    """The names in an MPI hostfile: the first word of each line, once each.

    How many workers a host gets is what the job's ``devices`` say: ``slots=`` and
    ``:2`` are not read.

    Raises:
        ValueError: there is something that is no name, or none at all.
    """
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    words = [re.sub(r":[0-9]+$", "", line[0]) for line in lines if line]
    return _checked(list(dict.fromkeys(words)))


def _checked(names: list[str]) -> tuple[str, ...]:
    if not names:
        raise ValueError("there is no host in it")
    for name in names:
        if not re.fullmatch(HOST_PATTERN, name, re.ASCII):
            raise ValueError(f"{name!r} is no name of a host")
    if len(set(names)) < len(names):
        raise ValueError("a host is in it twice")
    return tuple(names)
