"""A cluster through kubectl, where the Python client is not installed.

Covers: ``oomrun.kubernetes.cluster.Cluster`` by one kubectl for each request. Does not
cover: what the objects say.

What went wrong is read from what kubectl says: its exit code is 1 for all of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oomrun.core import words
from oomrun.kubernetes.client import CUSTOM, NAMESPACE_FILE
from oomrun.kubernetes.cluster import ClusterError, Manifest
from oomrun.kubernetes.submission import KINDS

__all__ = ["Kubectl", "connect"]

_TIMEOUT_S = 60
_REASON = re.compile(r"Error from server(?: \((\w+)\))?: (.*)", re.DOTALL)
# An operator's kind that the cluster does not have is an object that is not there.
_NO_KIND = "the server doesn't have a resource type"
_MAY_PASS = frozenset(
    {"InternalError", "ServerTimeout", "ServiceUnavailable", "Timeout",
     "TooManyRequests"}
)  # fmt: skip
_UNREACHABLE = ("Unable to connect to the server", "The connection to the server")
_HINTS = {
    "Forbidden": "ask for the rights in this namespace",
    "Unauthorized": "log in again",
}


def connect(program: str, context: str | None, namespace: str | None) -> Kubectl:
    """The cluster that kubectl is set to.

    Args:
        program: kubectl.
        context: of the kubeconfig; None for the current one.
        namespace: None for that of the context.

    Raises:
        ClusterError: there is no way to a cluster.
    """
    command = [program, *([] if context is None else ["--context", context])]
    shown = _run([*command, "config", "view", "--minify", "-o", "json"])
    if shown.returncode == 0:
        settings = json.loads(shown.stdout)
        (chosen,), (cluster,) = settings["contexts"], settings["clusters"]
        own = chosen["context"].get("namespace")
        host = str(cluster["cluster"].get("server", "?"))
    elif context is None and os.path.exists(NAMESPACE_FILE):
        own, host = Path(NAMESPACE_FILE).read_text(encoding="utf-8").strip(), "here"
    else:
        why = words.one_line(shown.stderr.removeprefix("error: "), 300)
        raise ClusterError(
            f"there is no way to a cluster: {why}", hint="kubectl cluster-info"
        )
    return Kubectl(command=command, namespace=namespace or own or "default", host=host)


@dataclass(slots=True, kw_only=True)
class Kubectl:
    """One namespace of a cluster, by kubectl.

    Attributes:
        command: kubectl with its context.
        host: of the API server, for people.
    """

    command: list[str]
    namespace: str
    host: str

    def create(self, manifest: Manifest) -> bool:
        """Makes the object; False where one of the kind and name is there already."""
        what = f"create {manifest['kind']} {manifest['metadata']['name']}"
        # It would ask for the whole OpenAPI document to hold the fields against.
        asked = ["create", "--validate=false", "-o", "name", "-f", "-"]
        said = self._asked(what, asked, gone="AlreadyExists", given=manifest)
        return said is not None

    def read(self, kind: str, name: str) -> Manifest | None:
        """The object, or None where there is none."""
        asked = ["get", _resource(kind), name, "-o", "json"]
        return _object(self._asked(f"read {kind} {name}", asked))

    def listed(self, kind: str, selector: Mapping[str, str]) -> list[Manifest]:
        """The objects with these labels."""
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        asked = ["get", _resource(kind), "--selector", labels, "-o", "json"]
        found = _object(self._asked(f"list {kind}", asked))
        return list((found or {}).get("items") or [])

    def delete(self, kind: str, name: str) -> bool:
        """Deletes it, a Job once its pods are gone; False where there is none."""
        # In the foreground others would be there until a controller comes by.
        policy = "foreground" if kind in KINDS.values() else "background"
        options = [f"--cascade={policy}", "--wait=false", "-o", "name"]
        asked = ["delete", _resource(kind), name, *options]
        return self._asked(f"delete {kind} {name}", asked) is not None

    def log(
        self, pod: str, *, follow: bool, since_s: int | None = None
    ) -> Iterator[bytes]:
        """What the pod has printed, in pieces."""
        asked = ["logs", pod, *(["--follow"] if follow else [])]
        asked += [] if since_s is None else [f"--since={since_s}s"]
        with subprocess.Popen(
            self._words(asked), stdin=subprocess.DEVNULL, env=_environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            printed = False
            try:
                while piece := os.read(process.stdout.fileno(), 4096):
                    printed = True
                    yield piece
                error = process.stderr.read().decode(errors="replace")
            finally:
                process.kill()
        # After some of it: the connection was lost, and the pod goes on.
        if not printed and _REASON.search(error):
            self._check(f"read Pod {pod}", error, gone="NotFound")

    def _asked(
        self,
        what: str,
        asked: list[str],
        *,
        gone: str = "NotFound",
        given: Manifest | None = None,
    ) -> str | None:
        """What kubectl prints, or None where the server says ``gone``."""
        text = None if given is None else json.dumps(given)
        done = _run(self._words([*asked, f"--request-timeout={_TIMEOUT_S}s"]), text)
        if done.returncode == 0:
            return done.stdout
        self._check(what, done.stderr, gone=gone)
        return None

    def _check(self, what: str, error: str, *, gone: str) -> None:
        """Raises what went wrong, unless it is only that the server says ``gone``."""
        found = _REASON.search(error)
        reason, said = (found[1], found[2]) if found else (None, error)
        if reason == gone or (gone == "NotFound" and _NO_KIND in error):
            return
        said = words.one_line(said.removeprefix("error: "), 500)
        if any(each in error for each in _UNREACHABLE):
            problem = f"the cluster cannot be reached: {said}"
            raise ClusterError(problem, where=self.host, may_pass=True)
        if "(Unauthorized)" in error:
            reason = "Unauthorized"
        told = f" ({reason})" if reason else ""
        raise ClusterError(
            f"cannot {what}: {said}{told}",
            where=self.host,
            hint=_HINTS.get(reason or ""),
            may_pass=reason in _MAY_PASS,
        )

    def _words(self, asked: list[str]) -> list[str]:
        return [*self.command, "--namespace", self.namespace, *asked]


def _resource(kind: str) -> str:
    """The kind as kubectl has it, with its group where others might have one, too."""
    if kind in CUSTOM:
        group, version, plural = CUSTOM[kind]
        return f"{plural}.{version}.{group}"
    groups = {"Job": ".v1.batch", "NetworkPolicy": ".v1.networking.k8s.io"}
    return kind.lower() + groups.get(kind, "")


def _object(text: str | None) -> Manifest | None:
    if text is None:
        return None
    found: Manifest = json.loads(text)
    return found


def _run(asked: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            asked, input=text or "", capture_output=True, text=True, errors="replace",
            env=_environment(), timeout=2 * _TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ClusterError("kubectl does not end", may_pass=True) from None


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # what it says is read
