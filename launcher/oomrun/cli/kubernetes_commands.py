"""``oomrun render`` and ``oomrun lint``: a job's objects on Kubernetes.

Covers: options, files, what is printed. Does not cover: the objects and what is wrong
with some (``oomrun.kubernetes``); neither needs a cluster or a client.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from oomrun.cli.jobfile_commands import add_set_option, describe
from oomrun.cli.run_command import add_run_dir_option
from oomrun.core.errors import OomrunError, Problem
from oomrun.core.kubernetes_spec import Mode

if TYPE_CHECKING:
    from oomrun.kubernetes.reading import Located
    from oomrun.kubernetes.submission import Submission
    from oomrun.kubernetes.versions import Version

__all__ = [
    "add_mode_option",
    "add_parsers",
    "add_version_option",
    "checked_manifests",
    "lint",
    "render",
]

_EXIT_WRONG = 2


class _Rejected(OomrunError):
    """The objects of a job are not what a cluster takes."""

    exit_code = _EXIT_WRONG


def add_parsers(subparsers: Any) -> None:
    """Adds ``render`` and ``lint`` to the command line."""
    show: argparse.ArgumentParser = subparsers.add_parser(
        "render",
        help="print a job's objects on Kubernetes",
        description="Print the objects that the job is on Kubernetes, as YAML. Needs "
        "no cluster and no client. The script and kubernetes.files go along in a "
        "ConfigMap; variables in the job file are filled in in the pod.",
    )
    show.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(show)
    add_run_dir_option(show)
    show.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        default="-",
        help="write a file for each object and a kustomization.yaml there (default: -, "
        "to standard output)",
    )
    show.add_argument(
        "--watch",
        action="store_true",
        help="print the objects of a pod on the cluster that submits the job and "
        "watches it, as `oomrun submit --watch` does here",
    )
    add_version_option(show)
    add_mode_option(show)
    show.add_argument("--json", action="store_true", help="print one JSON list")
    show.set_defaults(handler=render)

    check: argparse.ArgumentParser = subparsers.add_parser(
        "lint",
        help="check objects of Kubernetes for what schemas do not see",
        description="Check manifests for what JSON schemas let pass: names, labels, "
        "quantities, words that are none of the known ones, what needs something "
        "beside it, volumes, and the profile restricted of Pod Security. Unknown "
        "fields are for the API server to tell.",
        epilog="Exit code: 0 if nothing was found, 2 if something was.",
    )
    check.add_argument(
        "manifests", metavar="MANIFEST", nargs="+", help="a YAML file, a folder, or -"
    )
    add_version_option(check)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(handler=lint)


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--kubernetes-version``."""
    parser.add_argument(
        "--kubernetes-version",
        metavar="VERSION",
        type=_version,
        help="of the cluster, from 1.29 to 1.37: refuse what it does not have",
    )


def add_mode_option(parser: argparse.ArgumentParser) -> None:
    """The option ``--mode``, which is the key of the job file."""
    parser.add_argument(
        "--mode",
        dest="set",
        action="append",
        type=_mode,
        metavar="MODE",
        help="job, jobset, mpijob or trainjob, as kubernetes.mode in the job file",
    )


def render(args: argparse.Namespace) -> int:
    """Prints or writes the objects of a job.

    Raises:
        SpecError: the job file is wrong.
    """
    from oomrun.cli.cluster_job import describe_need, read_submission
    from oomrun.kubernetes import writing

    submission = read_submission(args)
    made = checked_manifests(submission, args.kubernetes_version)
    if args.watch:
        made = _watcher(submission, args.kubernetes_version)
    for note in describe_need(submission):
        print(f"oomrun: {note}", file=sys.stderr)
    if args.output != "-":
        return _write(Path(args.output), made)
    if args.json:
        whole = {"apiVersion": "v1", "kind": "List", "items": made}
        print(json.dumps(whole, indent=2))
    else:
        print(writing.documents(made), end="")
    return 0


def checked_manifests(
    submission: Submission, version: Version | None
) -> list[dict[str, Any]]:
    """The objects of a job, with nothing found in them.

    Raises:
        OomrunError: something was: what the job file says leads to it.
    """
    from oomrun.kubernetes.manifests import manifests

    return _checked(manifests(submission), version)


def _watcher(submission: Submission, version: Version | None) -> list[dict[str, Any]]:
    from oomrun.kubernetes.watcher import watcher_objects

    if submission.section.namespace is None:
        raise _Rejected(
            "--watch needs kubernetes.namespace, to give rights to an account there "
            "(such as --set kubernetes.namespace=default)"
        )
    return _checked(watcher_objects(submission), version)


def _checked(
    made: list[dict[str, Any]], version: Version | None
) -> list[dict[str, Any]]:
    from oomrun.kubernetes.lint import lint as check

    wrong = [
        f"{manifest['kind']} {manifest['metadata']['name']}: {_told(finding)}"
        for manifest, findings in zip(made, check(made, version), strict=True)
        for finding in findings
    ]
    if wrong:
        raise _Rejected("\n".join(wrong))
    return made


def lint(args: argparse.Namespace) -> int:
    """Checks manifests: 0 if nothing was found, 2 if something was."""
    from oomrun.kubernetes.lint import lint as check

    located, problems = _read_all(args.manifests)
    objects = [each for _, each in located]
    found = check([each.manifest for each in objects], args.kubernetes_version)
    for (file, each), findings in zip(located, found, strict=True):
        named = f"{each.kind or 'object'} {each.name}".strip()
        for path, message, hint in findings:
            line, column = each.place(path)
            problems.append(
                Problem(
                    file=file, line=line, column=column, path=f"{named}: {path}",
                    message=message, hint=hint,
                )
            )  # fmt: skip
    if args.json:
        keys = ("file", "line", "column", "path", "message", "hint")
        errors = [{key: getattr(each, key) for key in keys} for each in problems]
        print(json.dumps({"valid": not problems, "errors": errors}))
    elif problems:
        print(describe(problems), file=sys.stderr)
    else:
        print(f"{len(objects)} objects, nothing found")
    return _EXIT_WRONG if problems else 0


def _read_all(
    names: Sequence[str],
) -> tuple[list[tuple[str, Located]], list[Problem]]:
    """All objects with their files, and what cannot be read."""
    from oomrun.kubernetes.reading import Unreadable, read

    found: list[tuple[str, Located]] = []
    problems = []
    for name in _files(names):
        try:
            if name == "-":
                text = sys.stdin.read()
            else:
                text = Path(name).read_text(encoding="utf-8")
            found += [(name, each) for each in read(text)]
        except Unreadable as error:
            problems.append(_problem(name, str(error), error.line, error.column))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            problems.append(_problem(name, f"cannot be read: {why}"))
        except ValueError:
            problems.append(_problem(name, "is no UTF-8 text"))
    return found, problems


def _files(names: Sequence[str]) -> list[str]:
    files = []
    for name in names:
        if name != "-" and Path(name).is_dir():
            inside = sorted(Path(name).glob("*.y*ml"))
            # It is no object of the cluster.
            files += [str(f) for f in inside if f.stem != "kustomization"]
        else:
            files.append(name)
    return files


def _problem(file: str, message: str, line: int = 1, column: int = 1) -> Problem:
    return Problem(file=file, line=line, column=column, path="", message=message)


def _told(finding: Any) -> str:
    path, message, hint = finding
    return f"{path}: {message}{f' ({hint})' if hint else ''}"


def _write(folder: Path, made: Sequence[dict[str, Any]]) -> int:
    """One file for each object, and one that names them all."""
    from oomrun.kubernetes import writing
    from oomrun.rundir import write_atomically

    names = []
    for manifest in made:
        name = f"{manifest['kind'].lower()}.yaml"
        write_atomically(folder / name, writing.document(manifest).encode())
        names.append(name)
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": names,
    }
    write_atomically(folder / "kustomization.yaml", writing.document(whole).encode())
    print(f"{folder}: {len(names)} objects; `kubectl apply -k {folder}` makes them")
    return 0


def _mode(text: str) -> str:
    known = get_args(Mode)
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return f"kubernetes.mode={text}"


def _version(text: str) -> Version:
    from oomrun.kubernetes.versions import parse_version

    try:
        return parse_version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
