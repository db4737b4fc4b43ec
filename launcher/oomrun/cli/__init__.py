"""The ``oomrun`` command: arguments in, exit code out.

Covers: finding the command, help, and what an error looks like. Does not cover: the
commands, each in its own module, imported when it is called and not before.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from oomrun import __version__
from oomrun.core.errors import OomrunError, SpecError

__all__ = ["COMMANDS", "Command", "build_parser", "main"]

EXIT_WRONG = 2
EXIT_OURS = 4
_SIGPIPE_EXIT = 128 + 13
_SIGINT_EXIT = 128 + 2


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its group in the help, its module, its arguments and one line."""

    group: str
    module: str
    arguments: str
    summary: str


_CLUSTER = "oomrun.cli.cluster_commands"
_JOBFILE = "oomrun.cli.jobfile_commands"
COMMANDS = {
    "run": Command(
        "Training", "oomrun.cli.run_command", "JOB",
        "train; goes on where an unfinished run was",
    ),
    "plan": Command(
        "Training", "oomrun.cli.plan_command", "JOB",
        "show what would be run and why; trains nothing",
    ),
    "status": Command(
        "Training", "oomrun.cli.status_command", "RUN_DIR", "show how a run stands"
    ),
    "report": Command(
        "Training", "oomrun.cli.report_command", "RUN_DIR",
        "write a run as one HTML file",
    ),
    "diagnose": Command(
        "Training", "oomrun.cli.diagnose_command", "LOG",
        "say from any program's log what went wrong",
    ),
    "top": Command(
        "Training", "oomrun.cli.top_command", "[RUN...]", "watch runs on the terminal"
    ),
    "init": Command("Job files", _JOBFILE, "SCRIPT", "write a job file for a script"),
    "validate": Command("Job files", _JOBFILE, "JOB", "check a job file"),
    "schema": Command("Job files", _JOBFILE, "", "print the JSON Schema of job files"),
    "render": Command(
        "Kubernetes", "oomrun.cli.kubernetes_commands", "JOB",
        "print a job's objects on Kubernetes",
    ),
    "lint": Command(
        "Kubernetes", "oomrun.cli.kubernetes_commands", "MANIFEST",
        "check objects of Kubernetes for what schemas do not see",
    ),
    "submit": Command("Kubernetes", _CLUSTER, "JOB", "send a job to a cluster"),
    "wait": Command("Kubernetes", _CLUSTER, "JOB", "wait for a job on a cluster"),
    "logs": Command("Kubernetes", _CLUSTER, "JOB", "print what such a job prints"),
    "cancel": Command("Kubernetes", _CLUSTER, "JOB", "delete such a job"),
    "devices": Command(
        "Machine", "oomrun.cli.devices_command", "",
        "show the devices and their memory, and the host's",
    ),
    "monitor": Command(
        "Machine", "oomrun.cli.monitor_command", "",
        "serve the metrics of all runs of this machine, and of its devices",
    ),
    "monitoring": Command(
        "Machine", "oomrun.cli.monitoring_command", "export",
        "print or write Grafana dashboards and alert rules",
    ),
    "completion": Command(
        "Machine", "oomrun.cli.completion", "SHELL",
        "print a completion script for bash, zsh or fish",
    ),
}  # fmt: skip

_HELP_END = """\
oomrun JOB is short for oomrun run JOB; oomrun COMMAND --help tells more.

Examples:
  oomrun init train.py              write job.yaml for a script
  oomrun job.yaml                   train; again after an interruption: goes on
  oomrun job.yaml --set memory.headroom=5%
  oomrun plan --measure job.yaml    what fits, and what memory is used for
  oomrun status runs/digits-cnn     how a run stands
  oomrun diagnose train.log         what went wrong, in any program's log

Exit codes:
  0 finished   1 the training failed   2 the job file or the command line is wrong
  3 nothing fits into memory   4 the machine or oomrun itself
  75 stopped by SIGTERM, the same command goes on   128+n stopped by signal n
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; never raises."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_streams()
    try:
        code = _main(arguments)
        # A reader that has gone shows here, not while the interpreter ends.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence_stdout()
        return _SIGPIPE_EXIT
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    except SpecError as error:
        from oomrun.cli.jobfile_commands import describe

        _complain(describe(error.problems))
        return error.exit_code
    except OomrunError as error:
        _complain(f"oomrun: {error}")
        return error.exit_code
    except OSError as error:
        if not _is_of_stdout(error):
            _complain(f"oomrun: internal error: {_internal(error)}")
            return EXIT_OURS
        _silence_stdout()
        _complain(f"oomrun: the output cannot be written: {error.strerror}")
        return EXIT_OURS
    except Exception as error:
        _complain(f"oomrun: internal error: {_internal(error)}")
        return EXIT_OURS


def _main(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in ("", "-h", "--help", "help"):
        print(help_text(), end="", file=sys.stdout if first else sys.stderr)
        return 0 if first else EXIT_WRONG
    if first in ("-V", "--version"):
        print(f"oomrun {__version__}")
        return 0
    if first not in COMMANDS:
        if not _may_be_job(first):
            _complain(f"oomrun: {_unknown(first)}")
            return EXIT_WRONG
        arguments = ["run", *arguments]
    try:
        args = build_parser([arguments[0]]).parse_args(arguments)
    except SystemExit as end:  # argparse has said why, or has printed its help
        return end.code if isinstance(end.code, int) else EXIT_WRONG
    handler = getattr(args, "handler", None) or args.run
    return int(handler(args))


def build_parser(names: list[str]) -> argparse.ArgumentParser:
    """The parser that knows these commands; others' modules are not imported."""
    parser = argparse.ArgumentParser(prog="oomrun")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for path in dict.fromkeys(COMMANDS[name].module for name in names):
        module: Any = importlib.import_module(path)
        add = getattr(module, "add_parsers", None) or module.add_parser
        add(subparsers)
    return parser


def help_text() -> str:
    """The help of ``oomrun`` itself."""
    lines = ["usage: oomrun JOB [options]", "       oomrun COMMAND [options]", ""]
    lines += ["Train a Keras script within the memory there is.", ""]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {name:<10} {command.arguments:<8} {command.summary}")
        lines.append("")
    return "\n".join(lines) + "\n" + _HELP_END


def _may_be_job(word: str) -> bool:
    """Whether the word is a job file, or an option of ``run`` before one."""
    looks = word.endswith((".yaml", ".yml")) or os.sep in word or word.startswith("-")
    return looks or os.path.isfile(word)


def _unknown(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    if near:
        return f"there is no command {word!r}; did you mean {near[0]}?"
    return f"there is no command and no job file {word!r}; see oomrun --help"


def _internal(error: Exception) -> str:
    """One line about an error that is our own fault; its traceback goes to a file."""
    import tempfile
    import traceback

    said = " ".join(f"{type(error).__name__}: {error}".split())
    if os.environ.get("OOMRUN_DEBUG") == "1":
        traceback.print_exc()
        return said
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="oomrun-error-", suffix=".log", delete=False
        ) as file:
            traceback.print_exc(file=file)
    except OSError:
        return f"{said}; OOMRUN_DEBUG=1 shows where"
    return f"{said}; please report it with {file.name}"


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return  # nobody listens; the exit code tells it all


def _open_streams() -> None:
    """Gives us streams where we were started without, as daemons are."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, null)


def _is_of_stdout(error: OSError) -> bool:
    """Whether writing our own output failed; files that fail are named in the error."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO)


def _silence_stdout() -> None:
    """Lets the interpreter end without a second complaint about the closed pipe."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return  # stdout is no file, as under a test
