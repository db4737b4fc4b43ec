"""``oomrun submit``, ``wait``, ``logs`` and ``cancel``: a job on a cluster.

Covers: what is done in which order, and what is said. Does not cover: the objects
(``kubernetes_commands``), how a job stands (``oomrun.kubernetes.endings``), the API.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oomrun.cli.cluster_job import OfThePod, describe_need, read_submission
from oomrun.cli.jobfile_commands import add_set_option, read_text
from oomrun.cli.kubernetes_commands import add_version_option, checked_manifests
from oomrun.cli.run_command import add_run_dir_option, duration
from oomrun.core import jobfile
from oomrun.core.errors import PlatformError, SpecError
from oomrun.kubernetes import writing
from oomrun.kubernetes.cluster import Cluster, ClusterError, connect
from oomrun.kubernetes.endings import standing

if TYPE_CHECKING:
    from oomrun.core.spec import JobSpec
    from oomrun.kubernetes.endings import Standing

__all__ = ["add_parsers", "show_status"]

_NONE_SUCH = 2
_TOO_LONG = PlatformError.exit_code
_PAUSE_S = 1.0
# A job of days must not be given up for a restart of the API server.
_MOST_FAILURES = 60
_DELETED_WITHIN_S = 300.0
# Not the job's name: pods of a job that was deleted may be there for a while.
_POD_LABEL = "batch.kubernetes.io/controller-uid"
_MANAGED_BY = "app.kubernetes.io/managed-by"
_INSTANCE = "app.kubernetes.io/instance"
# They have no state; one that is there may be of another form of the job.
_MADE_ANEW = ("NetworkPolicy", "PodMonitor")


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
        _say(note)
    if args.dry_run:
        print(writing.documents(made), end="")
        return 0
    cluster = connect(args.context, submission.section.namespace)
    _make_room(cluster, submission.name, args.job)
    for manifest in made:
        _make(cluster, manifest)
    for old in cluster.listed("ConfigMap", submission.selector):
        if old["metadata"]["name"] != submission.config_name:
            cluster.delete("ConfigMap", old["metadata"]["name"])
    _say(f"submitted as the job {submission.name} in {cluster.namespace}")
    if args.wait or args.follow:
        return _wait(cluster, submission.name, args)
    _say(f"`oomrun wait {args.job}` waits for it")
    return 0


def wait(args: argparse.Namespace) -> int:
    """Waits for the job; its exit code."""
    spec, cluster = _target(args)
    return _wait(cluster, spec.name, args)


def logs(args: argparse.Namespace) -> int:
    """Prints the log of the newest pod."""
    spec, cluster = _target(args)
    found = _look(cluster, spec.name)
    if found is None:
        return _none_such(cluster, spec.name)
    if found.pod is None:
        _say(found.message)
        return 0
    _copy_log(cluster, found.pod, follow=args.follow)
    return 0


def cancel(args: argparse.Namespace) -> int:
    """Deletes the job and what was made for it, but not its volume."""
    spec, cluster = _target(args)
    if cluster.read("Job", spec.name) is None:
        return _none_such(cluster, spec.name)
    for kind in ("Job", *_MADE_ANEW, "ServiceAccount"):
        found = cluster.read(kind, spec.name)
        if found is not None and _is_ours(found):
            cluster.delete(kind, spec.name)
        elif kind == "Job" and found is not None:
            raise _not_ours(spec.name)
    own = {_INSTANCE: spec.name, _MANAGED_BY: "oomrun"}
    for config in cluster.listed("ConfigMap", own):
        cluster.delete("ConfigMap", config["metadata"]["name"])
    _say(f"the job {spec.name} in {cluster.namespace} is deleted; a volume stays")
    return 0


def show_status(args: argparse.Namespace) -> int:
    """``oomrun status --kubernetes JOB``: how the job stands on its cluster."""
    spec, cluster = _target(args)
    found = _look(cluster, spec.name)
    if found is None:
        return _none_such(cluster, spec.name)
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


def _target(args: argparse.Namespace) -> tuple[JobSpec, Cluster]:
    """The job that the file names, and the namespace where it is.

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
    return examined.spec, connect(args.context, section.namespace)


def _make_room(cluster: Cluster, name: str, job_file: str) -> None:
    """Deletes a job of the name that has ended.

    Raises:
        ClusterError: there is one that has not, or that oomrun did not make.
    """
    found = cluster.read("Job", name)
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
    cluster.delete("Job", name)
    # Its pods may still write a checkpoint that the next one begins with.
    until = time.monotonic() + _DELETED_WITHIN_S
    while cluster.read("Job", name) is not None:
        if time.monotonic() > until:
            raise ClusterError(f"the job {name} of before does not go away")
        time.sleep(_PAUSE_S)


def _make(cluster: Cluster, manifest: dict[str, Any]) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if cluster.create(manifest):
        return
    if kind == "Job":  # between our look and now
        raise ClusterError(f"somebody else has just submitted the job {name}")
    if kind in _MADE_ANEW:
        found = cluster.read(kind, name)
        if found is not None and not _is_ours(found):
            raise ClusterError(f"there is a {kind} {name} that oomrun did not make")
        cluster.delete(kind, name)
        cluster.create(manifest)


def _is_ours(manifest: dict[str, Any]) -> bool:
    labels = manifest["metadata"].get("labels") or {}
    return bool(labels.get(_MANAGED_BY) == "oomrun")


def _not_ours(name: str) -> ClusterError:
    return ClusterError(
        f"there is a job {name} that oomrun did not make", hint="choose another name"
    )


def _look(cluster: Cluster, name: str) -> Standing | None:
    """How the job stands; None where there is none."""
    job = cluster.read("Job", name)
    if job is None:
        return None
    return standing(job, cluster.listed("Pod", {_POD_LABEL: job["metadata"]["uid"]}))


def _wait(cluster: Cluster, name: str, args: argparse.Namespace) -> int:
    until = None if args.timeout is None else time.monotonic() + args.timeout
    try:
        return _Waiting(cluster, name, args.follow, until).run()
    except KeyboardInterrupt:
        _say("the job goes on")
        raise


class _Waiting:
    """Looks at a job again and again, and tells what is new."""

    def __init__(
        self, cluster: Cluster, name: str, follow: bool, until: float | None
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.follow = follow
        self.until = until
        self.said = ""
        self.printed: dict[str, float] = {}  # when the log of a pod ended
        self.failures = 0

    def run(self) -> int:
        """Waits to the end; the exit code."""
        seen = False
        while True:
            found = self._look()
            if found is not None:
                seen = True
                self._print_log(found)
                self._tell(found.message)
                if found.exit_code is not None:
                    return found.exit_code
            elif not self.failures:
                if not seen:
                    return _none_such(self.cluster, self.name)
                _say(f"the job {self.name} was deleted")
                return _TOO_LONG
            if self.until is not None and time.monotonic() > self.until:
                _say("that is all the time there was; the job goes on")
                return _TOO_LONG
            time.sleep(_PAUSE_S)

    def _look(self) -> Standing | None:
        """How it stands; None where there is no job, or the cluster does not answer."""
        try:
            found = _look(self.cluster, self.name)
        except ClusterError as error:
            self.failures += 1
            if self.failures > _MOST_FAILURES or not error.may_pass:
                raise
            self._tell(f"{error}; trying again")
            return None
        self.failures = 0
        return found

    def _tell(self, message: str) -> None:
        if message != self.said:
            _say(message)
        self.said = message

    def _print_log(self, found: Standing) -> None:
        """The log of a pod that has begun, and its rest where the connection ended."""
        if not self.follow or found.pod is None:
            return
        since_s = None
        if found.pod in self.printed:
            if found.state != "running":
                return
            since_s = int(time.monotonic() - self.printed[found.pod]) + 1
        self._tell(found.message)
        _copy_log(self.cluster, found.pod, follow=True, since_s=since_s)
        self.printed[found.pod] = time.monotonic()


def _copy_log(
    cluster: Cluster, pod: str, *, follow: bool, since_s: int | None = None
) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in cluster.log(pod, follow=follow, since_s=since_s):
        sys.stdout.write(decoder.decode(piece))
        sys.stdout.flush()


def _none_such(cluster: Cluster, name: str) -> int:
    _say(f"there is no job {name} in {cluster.namespace}")
    return _NONE_SUCH


def _say(text: str) -> None:
    print(f"oomrun: {text}", file=sys.stderr, flush=True)
