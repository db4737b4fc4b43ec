"""Waiting for a job on a cluster: looking at it again and again, telling what is new.

Covers: its log along the way, and the exit code that waiting ends with. Does not cover:
how the job stands (``oomrun.kubernetes.endings``).
"""

from __future__ import annotations

import codecs
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from oomrun.core.errors import PlatformError
from oomrun.kubernetes.cluster import Cluster, ClusterError
from oomrun.kubernetes.endings import Standing, standing
from oomrun.kubernetes.submission import OWN_LABELS

__all__ = [
    "PAUSE_S", "Waiting", "copy_log", "look", "none_such", "pods_of", "say",
]  # fmt: skip

#: Between two looks.
PAUSE_S = 1.0

_NONE_SUCH = 2
_TOO_LONG = PlatformError.exit_code
# A job of days must not be given up for a restart of the API server.
_MOST_FAILURES = 60
# Not the job's name: pods of a job that was deleted may be there for a while.
_POD_LABEL = "batch.kubernetes.io/controller-uid"


@dataclass(slots=True, kw_only=True)
class Waiting:
    """Waits for a job.

    Attributes:
        follow: print what its pods print.
        timeout_s: wait no longer.
    """

    cluster: Cluster
    name: str
    kind: str
    follow: bool
    timeout_s: float | None
    _said: str = ""
    _failures: int = 0
    _printed: dict[str, float] = field(default_factory=dict)  # when a pod's log ended

    def run(self) -> int:
        """Waits to the end; the exit code."""
        try:
            return self._run()
        except KeyboardInterrupt:
            say("the job goes on")
            raise

    def _run(self) -> int:
        begin, seen = time.monotonic(), False
        while True:
            found = self._look()
            if found is not None:
                seen = True
                self._print_log(found)
                self._tell(found.message)
                if found.exit_code is not None:
                    return found.exit_code
            elif not self._failures:
                if not seen:
                    return none_such(self.cluster, self.name)
                say(f"the job {self.name} was deleted")
                return _TOO_LONG
            passed_s = time.monotonic() - begin
            if self.timeout_s is not None and passed_s > self.timeout_s:
                say("that is all the time there was; the job goes on")
                return _TOO_LONG
            time.sleep(PAUSE_S)

    def _look(self) -> Standing | None:
        """How it stands; None where there is no job, or the cluster does not answer."""
        try:
            found = look(self.cluster, self.kind, self.name)
        except ClusterError as error:
            self._failures += 1
            if self._failures > _MOST_FAILURES or not error.may_pass:
                raise
            self._tell(f"{error}; trying again")
            return None
        self._failures = 0
        return found

    def _tell(self, message: str) -> None:
        if message != self._said:
            say(message)
        self._said = message

    def _print_log(self, found: Standing) -> None:
        """The log of a pod that has begun, and its rest where the connection ended."""
        if not self.follow or found.pod is None:
            return
        since_s = None
        if found.pod in self._printed:
            if found.state != "running":
                return
            since_s = int(time.monotonic() - self._printed[found.pod]) + 1
        self._tell(found.message)
        try:
            copy_log(self.cluster, found.pod, follow=True, since_s=since_s)
        except ClusterError as error:  # its node may be gone, and the job goes on
            self._tell(str(error))
        self._printed[found.pod] = time.monotonic()


def look(cluster: Cluster, kind: str, name: str) -> Standing | None:
    """How the job stands; None where there is none."""
    job = cluster.read(kind, name)
    return None if job is None else standing(job, pods_of(cluster, job))


def pods_of(cluster: Cluster, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a job; those that are gone are not among them."""
    metadata = job["metadata"]
    if job["kind"] == "Job":
        return cluster.listed("Pod", {_POD_LABEL: metadata["uid"]})
    # An operator has Jobs or pods of its own, which have our labels.
    labels = metadata.get("labels") or {}
    own = {key: labels[key] for key in OWN_LABELS if key in labels}
    since = str(metadata.get("creationTimestamp", ""))
    return [
        pod
        for pod in cluster.listed("Pod", own)
        if str(pod["metadata"].get("creationTimestamp", "")) >= since
    ]


def copy_log(
    cluster: Cluster, pod: str, *, follow: bool, since_s: int | None = None
) -> None:
    """Prints what the pod has printed.

    Raises:
        ClusterError: there is no log to be had.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in cluster.log(pod, follow=follow, since_s=since_s):
        sys.stdout.write(decoder.decode(piece))
        sys.stdout.flush()


def none_such(cluster: Cluster, name: str) -> int:
    """Says that there is no such job; the exit code."""
    say(f"there is no job {name} in {cluster.namespace}")
    return _NONE_SUCH


def say(text: str) -> None:
    """What is for people, beside the job's own output."""
    print(f"oomrun: {text}", file=sys.stderr, flush=True)
