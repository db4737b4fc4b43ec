"""``oomrun submit``, ``wait``, ``logs`` and ``cancel``: a job on a cluster.

Covers: what is done in which order, and what is said. Does not cover: the objects
(``kubernetes_commands``), how a job stands (``oomrun.kubernetes.endings``), the API.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oomrun.cli import cluster_waiting
from oomrun.cli.cluster_job import OfThePod, describe_need, read_submission
from oomrun.cli.cluster_waiting import Waiting, copy_log, look, none_such, say
from oomrun.cli.jobfile_commands import add_set_option, read_text
from oomrun.cli.kubernetes_commands import (
    add_mode_option,
    add_version_option,
    checked_manifests,
)
from oomrun.cli.run_command import add_run_dir_option, duration, run_dir_of
from oomrun.core import jobfile
from oomrun.core.errors import SpecError
from oomrun.kubernetes import writing
from oomrun.kubernetes.cluster import Cluster, ClusterError, connect
from oomrun.kubernetes.endings import standing
from oomrun.kubernetes.submission import KINDS

if TYPE_CHECKING:
    from oomrun.core.spec import JobSpec
    from oomrun.kubernetes.submission import Submission

__all__ = ["add_parsers", "show_status"]

_DELETED_WITHIN_S = 300.0
_MANAGED_BY = "app.kubernetes.io/managed-by"
_INSTANCE = "app.kubernetes.io/instance"
# They have no state; one that is there may be of another form of the job.
_MADE_ANEW = ("NetworkPolicy", "PodMonitor", "Service", "TrainingRuntime")


def add_parsers(subparsers: Any) -> None:
    """Adds the commands to the command line."""
    send = _command(
        subparsers, "submit", submit, "send a job to a cluster",
        "Make the job's objects on Kubernetes: what `oomrun render` prints. A job of "
        "the name that has ended is replaced, and goes on from its volume; one that "
        "has not is left alone.",
    )  # fmt: skip
    add_run_dir_option(send)
    add_version_option(send)
    send.add_argument(
        "--dry-run", action="store_true", help="print what would be sent, send nothing"
    )
    send.add_argument("--wait", action="store_true", help="and then do as oomrun wait")
    send.add_argument(
        "--watch",
        action="store_true",
        help="as --wait, and submit the job again where that can help: as it was if "
        "its pod was taken away, with more host memory up to kubernetes.memory_max if "
        "the kernel killed it; what was decided is kept in runs/NAME.decisions.jsonl",
    )
    send.add_argument(
        "--resubmits",
        type=int,
        default=10,
        metavar="N",
        help="with --watch: how often at most (default: 10)",
    )
    send.add_argument(
        "--once",
        action="store_true",
        help="with --watch: leave a job that this has made before, and that has "
        "completed, was given up or is gone, as it is",
    )
    _add_waiting(send)
    stay = _command(
        subparsers, "wait", wait, "wait for a job on a cluster",
        "Wait until the job has ended, and end with its exit code: that of its last "
        "pod. Says how it stands whenever that changes. Ends with 4 where its pod "
        "cannot start by itself any more, such as for an image that is not there.",
    )  # fmt: skip
    _add_waiting(stay)
    show = _command(
        subparsers, "logs", logs, "print what a job on a cluster prints",
        "Print what the newest pod of the job has printed.",
    )  # fmt: skip
    show.add_argument(
        "-f", "--follow", action="store_true", help="go on until the pod ends"
    )
    _command(
        subparsers, "cancel", cancel, "delete a job from a cluster",
        "Delete the job's objects but its volume. A pod that runs writes a checkpoint "
        "before it goes; submitted again the job goes on from it.",
    )  # fmt: skip


def submit(args: argparse.Namespace) -> int:
    """Sends the job; the exit code, with ``--wait`` the job's own."""
    submission = read_submission(args)
    made = checked_manifests(submission, args.kubernetes_version)
    for note in describe_need(submission):
        say(note)
    if args.dry_run:
        print(writing.documents(made), end="")
        return 0
    cluster = connect(args.context, submission.section.namespace)
    if args.watch:
        return _watch(cluster, submission, args)
    _send(cluster, submission, made, args.job)
    if args.wait or args.follow:
        return _wait(cluster, submission.kind, submission.name, args)
    say(f"`oomrun wait {args.job}` waits for it")
    return 0


def _watch(cluster: Cluster, submission: Submission, args: argparse.Namespace) -> int:
    from oomrun.cli.resubmitting import Decisions, Resubmitting

    def send(changed: Submission) -> None:
        made = checked_manifests(changed, args.kubernetes_version)
        _send(cluster, changed, made, args.job)

    run_dir = run_dir_of(args, submission.spec)
    decisions = Decisions(run_dir.with_name(f"{run_dir.name}.decisions.jsonl"))
    return Resubmitting(
        args=args, cluster=cluster, decisions=decisions, make=send
    ).run()


def _send(
    cluster: Cluster, submission: Submission, made: list[dict[str, Any]], job_file: str
) -> None:
    """Makes the objects in the place of those of a job that has ended."""
    _make_room(cluster, submission.kind, submission.name, job_file)
    for manifest in made:
        _make(cluster, manifest)
    for old in cluster.listed("ConfigMap", submission.selector):
        if old["metadata"]["name"] != submission.config_name:
            cluster.delete("ConfigMap", old["metadata"]["name"])
    say(f"submitted as the job {submission.name} in {cluster.namespace}")


def wait(args: argparse.Namespace) -> int:
    """Waits for the job; its exit code."""
    kind, spec, cluster = _target(args)
    return _wait(cluster, kind, spec.name, args)


def logs(args: argparse.Namespace) -> int:
    """Prints the log of the newest pod."""
    kind, spec, cluster = _target(args)
    found = look(cluster, kind, spec.name)
    if found is None:
        return none_such(cluster, spec.name)
    if found.pod is None:
        say(found.message)
        return 0
    copy_log(cluster, found.pod, follow=args.follow)
    return 0


def cancel(args: argparse.Namespace) -> int:
    """Deletes the job and what was made for it, but not its volume."""
    main, spec, cluster = _target(args)
    if cluster.read(main, spec.name) is None:
        return none_such(cluster, spec.name)
    for kind in (main, *_made_beside(spec), "ServiceAccount"):
        found = cluster.read(kind, spec.name)
        if found is not None and _is_ours(found):
            cluster.delete(kind, spec.name)
        elif kind == main and found is not None:
            raise _not_ours(spec.name)
    own = {_INSTANCE: spec.name, _MANAGED_BY: "oomrun"}
    for config in cluster.listed("ConfigMap", own):
        cluster.delete("ConfigMap", config["metadata"]["name"])
    say(f"the job {spec.name} in {cluster.namespace} is deleted; a volume stays")
    return 0


def show_status(args: argparse.Namespace) -> int:
    """``oomrun status --kubernetes JOB``: how the job stands on its cluster."""
    kind, spec, cluster = _target(args)
    found = look(cluster, kind, spec.name)
    if found is None:
        return none_such(cluster, spec.name)
    if args.json:
        body = {"name": spec.name, "namespace": cluster.namespace, **asdict(found)}
        print(json.dumps(body, indent=2))
    else:
        print(f"{spec.name}: {found.state}: {found.message}")
    return 0


def _command(
    subparsers: Any, name: str, handler: Any, summary: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description
    )
    parser.add_argument("job", metavar="JOB", help="the job file")
    add_set_option(parser)
    add_mode_option(parser)
    parser.add_argument(
        "--context", metavar="NAME", help="of the kubeconfig; default: the current one"
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_waiting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print what its pods print while waiting",
    )
    parser.add_argument(
        "--timeout",
        type=duration,
        metavar="TIME",
        help="wait no longer, and end with 4; the job goes on (default: no limit)",
    )


def _target(args: argparse.Namespace) -> tuple[str, JobSpec, Cluster]:
    """What the job that the file names is, and the namespace where it is.

    Raises:
        SpecError: the file is wrong, or has no section ``kubernetes``.
    """
    examined = jobfile.examine(
        read_text(args.job),
        filename=args.job,
        overrides=args.set,
        environment=OfThePod(),
    )
    if examined.spec is None:
        raise SpecError(examined.problems)
    if examined.spec.kubernetes is None:
        wrong = "expected the key kubernetes"
        raise SpecError([examined.places[""].problem("", wrong, "for a cluster")])
    section = examined.spec.kubernetes
    cluster = connect(args.context, section.namespace)
    return KINDS[section.mode], examined.spec, cluster


def _made_beside(spec: JobSpec) -> list[str]:
    """Kinds of objects that the job has for itself; not each cluster has all kinds."""
    kinds = ["NetworkPolicy", "Service"]
    section = spec.kubernetes
    if section is not None and section.pod_monitor is not None:
        kinds.append("PodMonitor")
    if section is not None and section.mode == "trainjob":
        kinds.append("TrainingRuntime")
    return kinds


def _make_room(cluster: Cluster, kind: str, name: str, job_file: str) -> None:
    """Deletes a job of the name that has ended.

    Raises:
        ClusterError: there is one that has not, or that oomrun did not make.
    """
    found = cluster.read(kind, name)
    if found is None:
        return
    if not _is_ours(found):
        raise _not_ours(name)
    goes = "deletionTimestamp" in found["metadata"]
    if not goes and standing(found, ()).state not in ("completed", "failed"):
        raise ClusterError(
            f"the job {name} is in {cluster.namespace} already, and has not ended",
            hint=f"`oomrun wait {job_file}` or `oomrun cancel {job_file}`",
        )
    cluster.delete(kind, name)
    # Its pods may still write a checkpoint that the next one begins with.
    until = time.monotonic() + _DELETED_WITHIN_S
    while cluster.read(kind, name) is not None:
        if time.monotonic() > until:
            raise ClusterError(f"the job {name} of before does not go away")
        time.sleep(cluster_waiting.PAUSE_S)


def _wait(cluster: Cluster, kind: str, name: str, args: argparse.Namespace) -> int:
    waiting = Waiting(
        cluster=cluster,
        kind=kind,
        name=name,
        follow=args.follow,
        timeout_s=args.timeout,
    )
    return waiting.run()


def _make(cluster: Cluster, manifest: dict[str, Any]) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if cluster.create(manifest):
        return
    if kind in KINDS.values():  # between our look and now
        raise ClusterError(f"somebody else has just submitted the job {name}")
    if kind in _MADE_ANEW:
        found = cluster.read(kind, name)
        if found is not None and not _is_ours(found):
            raise ClusterError(f"there is a {kind} {name} that oomrun did not make")
        cluster.delete(kind, name)
        if not cluster.create(manifest):
            raise ClusterError(f"somebody else is making the {kind} {name}")


def _is_ours(manifest: dict[str, Any]) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get(_MANAGED_BY) == "oomrun")


def _not_ours(name: str) -> ClusterError:
    return ClusterError(
        f"there is a job {name} that oomrun did not make", hint="choose another name"
    )
