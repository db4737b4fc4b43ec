"""``oomrun validate``, ``schema`` and ``init``: what needs the job file only.

Covers: reading and writing the files, and how problems look on a terminal.
Does not cover: what is right and wrong in a job file, which ``core.jobfile`` decides.

It imports late, since ``validate`` has a quarter of a second and no device to look at.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oomrun.core.errors import Problem, SpecError

if TYPE_CHECKING:
    from oomrun.core.jobfile import Examination
    from oomrun.core.spec import JobSpec

EXIT_VALID = 0
EXIT_WRONG = 2

_WIDEST = 100  # of a source line under a message
_batch_size = re.compile(r"\bbatch_size\s*=\s*([1-9][0-9]{0,6})\b")
# Scripts with such names say nothing about the job; their folder does.
_EVERYBODYS_NAMES = frozenset({"train", "main", "run", "fit", "training", "script"})


def add_parsers(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the commands; each parser's default ``handler`` is its function."""
    check = subparsers.add_parser(
        "validate",
        help="check a job file",
        description="Check a job file and report everything that is wrong with it, "
        "each with file, line and column. Trains nothing, looks at no device.",
        epilog="Exit code: 0 if the file is valid, 2 if it is not.",
    )
    check.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(check)
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(handler=validate)

    show = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of job files",
        description="Print the JSON Schema (draft 2020-12) of job files. An editor "
        "with it completes keys and marks mistakes while you type.",
    )
    show.set_defaults(handler=schema)

    begin = subparsers.add_parser(
        "init",
        help="write a commented job file for a script",
        description="Write a job file for a training script, with a comment for "
        "every key. The script is not run and not changed.",
    )
    begin.add_argument("script", metavar="SCRIPT", help="such as train.py")
    begin.add_argument(
        "-o", "--output", metavar="FILE", default="job.yaml", help="default: job.yaml"
    )
    begin.add_argument("--name", help="the job's name; default: made from the path")
    begin.add_argument(
        "--force", action="store_true", help="overwrite the file if it is there"
    )
    begin.set_defaults(handler=init)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--set PATH=VALUE`` of every command that reads a job file."""
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="put a value over the file's, such as memory.headroom=5%%; repeatable",
    )


def load_job_file(path: str, overrides: Sequence[str] = ()) -> "JobSpec":
    """The job in a file, with its script known to be there.

    Raises:
        SpecError: The file cannot be read, or something in it is wrong.
    """
    from oomrun.core import jobfile

    text = read_text(path)
    examined = jobfile.examine(
        text, filename=path, overrides=overrides, environment=os.environ
    )
    folder = Path(path).parent
    problems = [
        *examined.problems,
        *_missing_script(examined, folder),
        *_missing_program(examined, folder),
    ]
    if problems or examined.spec is None:
        raise SpecError(problems)
    return examined.spec


def read_text(path: str) -> str:
    """The text of a job file.

    Raises:
        SpecError: It cannot be read, or is no text.
    """
    from oomrun.core import jobfile

    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise SpecError([_unreadable(path, error)]) from None
    return jobfile.decode(data, filename=path)


def validate(args: argparse.Namespace) -> int:
    """Check a job file: 0 if it is valid, 2 if not."""
    problems: Sequence[Problem] = ()
    try:
        job = load_job_file(args.job, args.set)
    except SpecError as error:
        problems = error.problems
    if args.json:
        errors = [_as_json(problem) for problem in problems]
        print(json.dumps({"valid": not problems, "errors": errors}))
    elif problems:
        print(describe(problems), file=sys.stderr)
    else:
        _say(f"{args.job}: valid ({job.name})")
    return EXIT_WRONG if problems else EXIT_VALID


def schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of job files."""
    from oomrun.core.jobfile import jsonschema

    print(json.dumps(jsonschema.schema(), indent=2))
    return EXIT_VALID


def init(args: argparse.Namespace) -> int:
    """Write a commented job file: 0 if it was written, 2 if it could not be."""
    from oomrun.core.jobfile import template

    script, output = Path(args.script), Path(args.output)
    try:
        source = script.read_text(encoding="utf-8", errors="replace")
        relative = os.path.relpath(script, output.parent)
        text = template.init_text(
            Path(relative).as_posix(),
            name=args.name or _name_for(script),
            batch_size=_only_batch_size(source),
        ).encode()
        with output.open("wb" if args.force else "xb") as file:
            file.write(text)
    except FileExistsError:
        return _refuse(f"{output}: exists already (--force overwrites it)")
    except (OSError, ValueError) as error:
        return _refuse(_reason(error, fallback=str(script)))
    _say(f"{output}: written; `oomrun {output}` runs {script}")
    return EXIT_VALID


def describe(problems: Sequence[Problem]) -> str:
    """The problems for people: each with its line of the file and a caret below."""
    blocks = []
    for problem in problems:
        blocks.append(str(problem))
        if problem.source_line.strip():
            blocks.extend(_pointed_at(problem.source_line, problem.column))
    if len(problems) > 1:
        blocks.append(f"{len(problems)} problems")
    return "\n".join(blocks)


def _say(text: str) -> None:
    # A path may have bytes in it that stdout cannot encode; stderr escapes them itself.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _pointed_at(line: str, column: int) -> tuple[str, str]:
    """A line and a caret under one column of it; long lines are cut around it."""
    clean = "".join(c if c.isprintable() else " " for c in line)
    start = max(0, column - 1 - _WIDEST // 2) if len(clean) > _WIDEST else 0
    return (
        f"    {clean[start : start + _WIDEST].rstrip()}",
        f"    {' ' * (column - 1 - start)}^",
    )


def _missing_script(examined: "Examination", folder: Path) -> list[Problem]:
    given = examined.values.get("script")
    if not isinstance(given, str):
        return []
    try:
        if (folder / given).is_file():
            return []
    except OSError:  # too long a name
        pass
    message = f"no such file: {folder / given}"
    hint = "paths are relative to the job file"
    return [examined.places["script"].problem("script", message, hint)]


def _missing_program(examined: "Examination", folder: Path) -> list[Problem]:
    """What is wrong with a command's first word, where the file is right."""
    from oomrun.core.spec import Command

    spec = examined.spec
    if spec is None or not isinstance(spec.program, Command):
        return []
    from oomrun.core import command

    word = spec.program.argv[0]
    if any(command.names(word)):
        return []  # which program it is, its numbers decide
    name = command.fill(word, {})
    folders = dict(spec.env).get("PATH", os.environ.get("PATH", os.defpath))
    message, hint = _unusable(name, folder, folders)
    if not message:
        return []
    place = examined.places.get("command[0]", examined.places["command"])
    return [place.problem("command[0]", message, hint)]


def _unusable(name: str, folder: Path, search: str) -> tuple[str, str]:
    """Why a program cannot be started, and what to do; two empty texts where it can."""
    import shutil

    if "/" not in name:
        if name and shutil.which(name, path=search):
            return "", ""
        return (
            f"no such program in PATH: {name}",
            "write ./ before a program that is beside the job file",
        )
    path = folder / name
    try:
        if not path.is_file():
            return f"no such file: {path}", "paths are relative to the job file"
        if not os.access(path, os.X_OK):
            return f"not executable: {path}", f"chmod +x {path}"
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return f"no such file: {path}", "paths are relative to the job file"
    return "", ""


def _unreadable(path: str, error: OSError | ValueError) -> Problem:
    reason = getattr(error, "strerror", None) or str(error)
    message = f"cannot read the job file: {reason}"
    return Problem(file=path, line=1, column=1, path="", message=message)


def _as_json(problem: Problem) -> dict[str, object]:
    keys = ("file", "line", "column", "path", "message", "hint")
    return {key: getattr(problem, key) for key in keys}


def _name_for(script: Path) -> str:
    if script.stem.lower() in _EVERYBODYS_NAMES:
        return script.resolve().parent.name or script.stem
    return script.stem


def _only_batch_size(source: str) -> int | None:
    """The batch size that the script's text names, if it names exactly one."""
    sizes = set(_batch_size.findall(source))
    return int(sizes.pop()) if len(sizes) == 1 else None


def _refuse(message: str) -> int:
    print(f"oomrun init: {message}", file=sys.stderr)
    return EXIT_WRONG


def _reason(error: OSError | ValueError, *, fallback: str) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or fallback}: {error.strerror}"
    return f"{fallback}: {error}"
