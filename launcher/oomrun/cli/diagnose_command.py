"""``oomrun diagnose LOG``: what went wrong, read from anybody's log.

Covers: one log for a person or as JSON, many as JSON lines. Does not cover: what logs
say (``core.judging``), reading large ones (``log_file``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from oomrun.cli.log_file import Excerpt, excerpt, excerpt_of
from oomrun.core import remedies, units, words
from oomrun.core.judging import judge
from oomrun.core.verdict import Verdict, clues_of, to_json

__all__ = ["add_parser", "diagnose"]

EXIT_WRONG = 2

_EPILOG = """\
LOG is what a program printed, of TensorFlow, JAX, PyTorch or any other; a kernel's,
SLURM's or Kubernetes's own words may be in it. No job file is needed.

With --jsonl each line of FILE is an object: "text", and where known "exit_code" and
"evidence": {"cgroup_oom_kill": 1, "k8s_reason": "OOMKilled", "slurm_state":
"OUT_OF_MEMORY", "worker_pids": [17], "other_pids_on_device": [99],
"shm_free_bytes": 0}. For each there is one line of JSON.

examples:
  oomrun diagnose train.log --exit-code 137
  kubectl logs trainer-0 --previous | oomrun diagnose -
  oomrun diagnose --jsonl failures.jsonl

It ends with 0 whatever it found, and with 2 where there is nothing to read.
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``diagnose`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diagnose",
        help="say from a log what went wrong",
        description="Say from a program's log whether memory ran out, which, and what "
        "would help.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "log", metavar="LOG", nargs="?", help="the log; - reads what is piped in"
    )
    parser.add_argument(
        "--exit-code",
        metavar="N",
        type=_exit_code,
        help="how the program ended; negative or 128+n for signal n",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--jsonl", metavar="FILE", help="many logs, one JSON object a line; - for stdin"
    )
    parser.set_defaults(handler=diagnose)


def _exit_code(text: str) -> int:
    try:
        code = int(text)
    except ValueError:
        code = 256
    if not -65 < code < 256:
        raise argparse.ArgumentTypeError(
            f"expected an exit code from -64 to 255, got {text}"
        )
    return code


def diagnose(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if (args.log is None) == (args.jsonl is None):
        print(
            "oomrun: diagnose reads either LOG (- for stdin) or --jsonl FILE",
            file=sys.stderr,
        )
        return EXIT_WRONG
    try:
        with _opened(args.jsonl or args.log) as stream:
            if args.jsonl is not None:
                return _many(stream, args.jsonl)
            return _one(excerpt(stream), args)
    except OSError as error:
        if error.filename is None and not isinstance(error, IsADirectoryError):
            raise  # of our own output
        why = (error.strerror or str(error)).lower()
        print(f"oomrun: {args.jsonl or args.log}: {why}", file=sys.stderr)
        return EXIT_WRONG


def _opened(name: str) -> BinaryIO:
    if name == "-":
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return Path(name).open("rb")


def _one(log: Excerpt, args: argparse.Namespace) -> int:
    if log.problem or (not log.text.strip() and args.exit_code is None):
        why = log.problem or "it is empty (--exit-code alone can tell something, too)"
        print(f"oomrun: {args.log}: {why}", file=sys.stderr)
        return EXIT_WRONG
    found = judge(clues_of(log.text, args.exit_code))
    if args.json:
        print(json.dumps(to_json(found), indent=2))
        return 0
    for line in _lines(found, args.log, log.size_bytes):
        print(line)
    return 0


def _lines(found: Verdict, name: str, size_bytes: int) -> Iterator[str]:
    name = "the log" if name == "-" else name
    yield f"{words.one_line(name)}: {words.one_line(found.summary)}"
    yield f"  kind        {found.kind}, {_how_sure(found.confidence)}"
    if found.cause is not None:
        yield f"  cause       {found.cause.value}"
    if found.told:
        yield f"  line        {words.one_line(found.told, 200)}"
    if found.facts.operation:
        yield f"  operation   {words.one_line(found.facts.operation, 200)}"
    label = "would help"
    for lever in found.levers:
        yield f"  {label:<10}  {remedies.LEVERS[lever]}"
        label = ""
    yield f"  read        {units.format_bytes(size_bytes)}"


def _how_sure(confidence: float) -> str:
    for least, word in ((0.9, "sure"), (0.65, "likely"), (0.45, "a guess")):
        if confidence >= least:
            return word
    return "nothing to go by"


def _many(stream: BinaryIO, name: str) -> int:
    code = 0
    for number, raw in enumerate(stream, 1):
        if not raw.strip():
            continue
        try:
            body = _of_object(_from_json(raw))
        except (ValueError, RecursionError) as error:
            why = f"{name}:{number}: {words.one_line(str(error), 200)}"
            print(f"oomrun: {why}", file=sys.stderr)
            body, code = {"error": why}, EXIT_WRONG
        print(json.dumps(body))
    return code


def _from_json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig" if raw[:1] == b"\xef" else "utf-8"))
    except UnicodeDecodeError:
        return json.loads(raw.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None


def _of_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError('expected an object with a "text"')
    code, evidence = value.get("exit_code"), value.get("evidence")
    if code is not None and (isinstance(code, bool) or not isinstance(code, int)):
        raise ValueError(f"exit_code: expected a number or null, got {code!r}")
    if evidence is not None and not isinstance(evidence, dict):
        raise ValueError("evidence: expected an object or null")
    found = judge(clues_of(excerpt_of(value["text"]), code, evidence))
    known = {"id": value["id"]} if "id" in value else {}
    return {**known, **to_json(found)}
