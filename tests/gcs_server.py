"""A bucket of Google Cloud Storage on this machine, for TensorFlow's own client.

Covers: the part of the JSON API that TensorFlow's ``gs://`` uses, over TLS, and the
proxy through which that client, whose addresses are fixed, comes here. The client is
the real one: it makes its requests, retries and caches as it would. Does not cover:
credentials, conditions, several users.
Source: tsl/platform/cloud/gcs_file_system.cc, as TensorFlow 2.21 asks.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Bucket", "serve"]

_HOSTS = ("www.googleapis.com", "storage.googleapis.com")


@dataclass
class Bucket:
    """What is there.

    Attributes:
        objects: content by name.
        refused: while set, every request that writes is answered with 403.
        environment: what a process needs to come here.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    refused: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def names(self, kind: str) -> list[str]:
        """Checkpoints of a kind that have a manifest."""
        found = re.compile(rf"/({kind}-[0-9-]+)/MANIFEST\.json$")
        return sorted(m[1] for name in self.objects if (m := found.search(name)))


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Bucket]:
    """Any bucket name leads to the one that is given."""
    folder.mkdir(parents=True, exist_ok=True)
    _certificate(folder)
    bucket = Bucket()

    class Bound(_Api):
        there = bucket

    api = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    api.socket = context.wrap_socket(api.socket, server_side=True)

    class Tunnel(_Proxy):
        to = api.server_address[1]

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Tunnel)
    for server in (api, proxy):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    bucket.environment = {
        "https_proxy": f"http://127.0.0.1:{proxy.server_address[1]}",
        "no_proxy": "localhost,127.0.0.1",
        "CURL_CA_BUNDLE": str(folder / "ca.pem"),
        # Without it TensorFlow looks for Google's machines to get a token from.
        "NO_GCE_CHECK": "true",
    }
    try:
        yield bucket
    finally:
        for server in (proxy, api):
            server.shutdown()
            server.server_close()


class _Proxy(BaseHTTPRequestHandler):
    """CONNECT for Google's hosts, which leads to us."""

    to = 0

    def do_CONNECT(self) -> None:
        if self.path.rpartition(":")[0] not in _HOSTS:
            self.send_error(403)
            return
        self.send_response(200)
        self.end_headers()
        with socket.create_connection(("127.0.0.1", self.to)) as there:
            back = threading.Thread(
                target=_pump, args=(there, self.connection), daemon=True
            )
            back.start()
            _pump(self.connection, there)
            back.join(10)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def _pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


class _Api(BaseHTTPRequestHandler):
    """Objects, as ``gcs_file_system.cc`` asks for them."""

    there: Bucket
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Content, one object's properties, or a list."""
        path, query = self._asked()
        if (found := re.match(r"/storage/v1/b/[^/]+/o/(.+)", path)) is not None:
            self._properties(unquote(found[1]))
        elif re.match(r"/storage/v1/b/[^/]+/o$", path):
            self._list(query)
        elif re.match(r"/storage/v1/b/[^/]+$", path):
            self._json({"location": "here"})
        else:
            self._content(unquote(path.split("/", 2)[2]))

    def do_POST(self) -> None:
        """The beginning of an upload, a whole one, or a copy to another name."""
        path, query = self._asked()
        body = self._body()
        if self._refused():
            return
        copied = re.match(r"/storage/v1/b/[^/]+/o/(.+)/rewriteTo/b/[^/]+/o/(.+)", path)
        if copied is not None:
            source, to = unquote(copied[1]), unquote(copied[2])
            if source not in self.there.objects:
                self._json({"error": {"code": 404}}, 404)
                return
            self.there.objects[to] = self.there.objects[source]
            self._json({"done": True})
            return
        name = query["name"]
        if query.get("uploadType") == "resumable":
            host = self.headers["Host"]
            self._empty(200, {"Location": f"https://{host}/session/{name}"})
            return
        self.there.objects[name] = body
        self._json({"name": name})

    def do_PUT(self) -> None:
        """The content of an upload, all at once."""
        path, _ = self._asked()
        body = self._body()
        if not self._refused():
            self.there.objects[unquote(path.removeprefix("/session/"))] = body
            self._empty(200)

    def do_DELETE(self) -> None:
        """An object goes."""
        path, _ = self._asked()
        if self._refused():
            return
        name = unquote(re.sub(r"/storage/v1/b/[^/]+/o/", "", path))
        gone = self.there.objects.pop(name, None)
        self._empty(404 if gone is None else 204)

    def _properties(self, name: str) -> None:
        if name not in self.there.objects:
            self._json({"error": {"code": 404}}, 404)
            return
        self._json(
            {
                "size": str(len(self.there.objects[name])),
                "generation": "1",
                "updated": "2026-01-01T00:00:00.000Z",
            }
        )

    def _list(self, query: Mapping[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, below = [], set()
        for name in sorted(self.there.objects):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                below.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append({"name": name})
        self._json({"items": items, "prefixes": sorted(below)})

    def _content(self, name: str) -> None:
        content = self.there.objects.get(name)
        if content is None:
            self._empty(404)
            return
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._send(200, content)
            return
        first, last = int(asked[1]), int(asked[2])
        if first >= len(content):
            self._empty(416)
            return
        part = content[first : last + 1]
        whole = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self._send(206, part, {"Content-Range": whole})

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        self.there.asked.append(f"{self.command} {self.path}")
        return parts.path, {k: v[0] for k, v in parse_qs(parts.query).items()}

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            # The length is in a header, too, as no other client would have it.
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refused(self) -> bool:
        if self.there.refused:
            self._json({"error": {"code": 403, "message": "no"}}, 403)
        return self.there.refused

    def _json(self, value: object, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode())

    def _empty(self, code: int, headers: Mapping[str, str] | None = None) -> None:
        self._send(code, b"", headers)

    def _send(
        self, code: int, content: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if code != 204:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def _certificate(folder: Path) -> None:
    """For Google's hosts, by a root of our own, which only this test trusts."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "server"):
        openssl("ecparam", "-genkey", "-name", "prime256v1", "-out", f"{name}.key")
    openssl("req", "-x509", "-key", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=root of a test")  # fmt: skip
    names = ",".join(f"DNS:{host}" for host in _HOSTS)
    (folder / "names").write_text(f"subjectAltName={names}\n")
    openssl("req", "-new", "-key", "server.key", "-out", "server.csr",
            "-subj", "/CN=server")  # fmt: skip
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "server.pem", "-days", "2",
            "-extfile", "names")  # fmt: skip
