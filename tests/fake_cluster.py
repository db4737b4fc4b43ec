"""An API server as far as our client needs one: objects in memory, over real HTTP.

What is sent is held against the schemas, and scripted pods play the cluster. It has no
controllers: a test says what becomes of a Job.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import pytest
import yaml

import fake_discovery
from kubernetes_jobs import check_whole, write_job
from oomrun.cli import cluster_waiting

VERSION = "1.34"
_MAIN = ("jobs", "jobsets", "mpijobs", "trainjobs")
Manifest = dict[str, Any]


class FakeCluster:
    """The server; ``objects`` has everything by (plural, namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.logs: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.forbidden: set[str] = set()
        self.without_log: set[str] = set()
        #: What happens when a kind is asked for, one thing each time.
        self.script: dict[str, list[Callable[[], object]]] = {}
        #: What becomes of each job that is made, in turn.
        self.lives: list[Callable[[], object]] = []
        #: So many requests fail as while a server restarts.
        self.broken = 0
        self.made = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forget(self) -> None:
        """As a new one, at the same address."""
        for kept in (self.objects, self.logs, self.requests, self.forbidden,
                     self.without_log, self.script, self.lives):  # fmt: skip
            kept.clear()
        self.broken = self.made = 0

    def write_config(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig that leads here."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}],
            "contexts": [{
                "name": "here",
                "context": {"cluster": "c", "user": "u", "namespace": namespace},
            }],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path

    def names(self, plural: str) -> list[str]:
        return [name for kind, _, name in self.objects if kind == plural]

    def finish(
        self, name: str, condition: str, reason: str = "", plural: str = "jobs"
    ) -> None:
        """Ends a Job, or what an operator has instead, as its controller would."""
        for (kind, _, found), manifest in self.objects.items():
            if kind == plural and found == name:
                made = {"type": condition, "status": "True", "reason": reason}
                manifest["status"] = {"conditions": [made]}

    def add_pod(
        self,
        job: str,
        name: str,
        status: Manifest,
        namespace: str = "default",
        plural: str = "jobs",
    ) -> None:
        """A pod of a job, with this status."""
        self.made += 1
        owner = self.objects[plural, namespace, job]["metadata"]
        uid = owner["uid"]
        self.objects["pods", namespace, name] = {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": namespace,
                "labels": {
                    **owner["labels"],
                    "batch.kubernetes.io/controller-uid": uid,
                },
                "creationTimestamp": f"2026-01-01T00:00:{self.made:02d}Z",
            },
            "spec": {"containers": [{"name": "worker", "image": "x"}]},
            "status": status,
        }  # fmt: skip


def _with_selector(manifest: Manifest) -> Manifest:
    """A Job with what the API server gives it."""
    if manifest.get("kind") != "Job":
        return manifest
    own = {"batch.kubernetes.io/controller-uid": manifest["metadata"]["uid"]}
    return {**manifest, "spec": {**manifest["spec"], "selector": {"matchLabels": own}}}


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Says nothing: tests look at ``requests``."""

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def do_DELETE(self) -> None:
            self._serve("DELETE")

        def _serve(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}") if length else {}
            url = urlsplit(self.path)
            cluster.requests.append((method, url.path))
            found = fake_discovery.answer(url.path)
            if found is not None:
                return self._reply(200, found)
            if "/namespaces/" not in url.path:
                return self._fail(404, "NotFound", "there is no such path")
            parts = url.path.split("/namespaces/")[1].split("/")
            namespace, plural, *rest = parts
            if plural in cluster.forbidden:
                return self._fail(403, "Forbidden", f"{plural} is forbidden: no rights")
            if rest[1:] == ["log"] and rest[0] in cluster.without_log:
                return self._fail(400, "BadRequest", "its node is gone")
            if rest[1:] == ["log"]:
                # Whoever comes again has had all of it.
                fresh = "sinceSeconds" not in url.query
                return self._reply(200, cluster.logs.get(rest[0], "") if fresh else "")
            if method == "POST":
                return self._create(plural, namespace, body)
            if method == "GET" and cluster.script.get(plural):
                cluster.script[plural].pop(0)()
            if cluster.broken:
                cluster.broken -= 1
                return self._fail(503, "ServiceUnavailable", "come again")
            if not rest:
                return self._list(plural, namespace, parse_qs(url.query))
            key = (plural, namespace, rest[0])
            if key not in cluster.objects:
                return self._fail(404, "NotFound", f'{plural} "{rest[0]}" not found')
            if method == "DELETE":
                return self._reply(200, cluster.objects.pop(key))
            return self._reply(200, _with_selector(cluster.objects[key]))

        def _create(self, plural: str, namespace: str, body: Manifest) -> None:
            key = (plural, namespace, body["metadata"]["name"])
            if key in cluster.objects:
                return self._fail(409, "AlreadyExists", f"{key[2]} already exists")
            try:
                check_whole(body, VERSION)
            except kubernetes_validate.ValidationError as error:
                return self._fail(422, "Invalid", error.message)
            except AssertionError as error:
                return self._fail(422, "Invalid", str(error))
            if body["metadata"].get("namespace", namespace) != namespace:
                return self._fail(400, "BadRequest", "the namespaces do not match")
            cluster.made += 1
            body["metadata"] |= {"namespace": namespace, "uid": f"uid-{cluster.made}"}
            cluster.objects[key] = body
            if plural in _MAIN and cluster.lives:
                cluster.lives.pop(0)()
            return self._reply(201, body)

        def _list(self, plural: str, namespace: str, query: dict[str, Any]) -> None:
            wanted = dict(
                pair.split("=", 1)
                for text in query.get("labelSelector", ())
                for pair in text.split(",")
            )
            items = [
                manifest
                for (kind, where, _), manifest in cluster.objects.items()
                if (kind, where) == (plural, namespace)
                and wanted.items() <= manifest["metadata"].get("labels", {}).items()
            ]
            for text in query.get("fieldSelector", ()):
                name = text.removeprefix("metadata.name=")
                items = [each for each in items if each["metadata"]["name"] == name]
            group, kind = fake_discovery.group_and_kind(plural)
            if "watch" in query:
                return self._watched(items, group, kind, query)
            kind = f"{kind}List"
            listed = {"apiVersion": group}
            self._reply(200, {**listed, "kind": kind, "metadata": {}, "items": items})

        def _watched(
            self, items: list[Manifest], group: str, kind: str, query: dict[str, Any]
        ) -> None:
            """What there is, and the end: whoever watches asks again."""
            first = query.get("sendInitialEvents") == ["true"]
            verb = "ADDED" if first else "MODIFIED"
            events: list[Manifest] = [
                {"type": verb, "object": {"apiVersion": group, "kind": kind, **each}}
                for each in items
            ]
            if first:  # newer clients have no list beside the watch
                end = {"k8s.io/initial-events-end": "true"}
                mark = {"resourceVersion": "1", "annotations": end}
                known = {"apiVersion": group, "kind": kind, "metadata": mark}
                events.append({"type": "BOOKMARK", "object": known})
            lines = "".join(json.dumps(each) + "\n" for each in events)
            self._reply(200, lines, "application/json")

        def _fail(self, code: int, reason: str, message: str) -> None:
            self._reply(
                code,
                {
                    "apiVersion": "v1", "kind": "Status", "status": "Failure",
                    "code": code, "reason": reason, "message": message,
                },
            )  # fmt: skip

        def _reply(self, code: int, body: Any, kind: str = "") -> None:
            text = body if isinstance(body, str) else json.dumps(body)
            content = text.encode()
            self.send_response(code)
            kind = kind or (
                "text/plain" if isinstance(body, str) else "application/json"
            )
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def lead_to(
    server: FakeCluster, folder: Path, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has commands run in ``folder``, on a job with this section, ask ``server``."""
    monkeypatch.chdir(folder)
    write_job(folder, section)
    monkeypatch.setenv("KUBECONFIG", str(server.write_config(folder / "kubeconfig")))
    monkeypatch.setattr(cluster_waiting, "PAUSE_S", 0.01)
