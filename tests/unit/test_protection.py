"""Who may scrape: TLS, tokens, passwords; and the metrics of those who do not."""

from __future__ import annotations

import base64
import http.server
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import certificates
import scenarios
from oomrun import metrics
from oomrun.core import jobfile
from oomrun.core.errors import SpecError
from oomrun.core.spec import BasicAuth, MetricsSpec, Secret, Tls
from oomrun.core.state import replay
from oomrun.metrics import handing_over
from oomrun.metrics.protection import Protection, ProtectionError, protection

TOKEN = "a-token-of-this-test"
WITH_TOKEN = MetricsSpec(token=Secret(variable="TOKEN"))
HTTPS = MetricsSpec(tls=Tls(certificate="server.pem", key="server.key"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates and secrets."""
    found = tmp_path_factory.mktemp("protection")
    certificates.make(found)
    (found / "password").write_text("pässword\n")
    (found / "empty").write_text(" \n")
    return found


def made(spec: MetricsSpec, folder: Path) -> Protection:
    return protection(spec, folder=folder, environment={"TOKEN": TOKEN, "EMPTY": ""})


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN}", True),
        (f"Bearer {TOKEN}x", False),
        ("Bearer ", False),
        ("", False),
        (TOKEN, False),
        (f"Basic {TOKEN}", False),
        ("Bearer ünknown", False),
    ],
)
def test_a_token(authorization: str, expected: bool, folder: Path) -> None:
    assert made(WITH_TOKEN, folder).admits(authorization) == expected


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (basic("me", "pässword"), True),
        (basic("me", "password"), False),
        (basic("you", "pässword"), False),
        ("Basic me:pässword", False),
        ("", False),
    ],
)
def test_a_user_with_a_password(
    authorization: str, expected: bool, folder: Path
) -> None:
    auth = BasicAuth(user="me", password=Secret(file="password"))
    found = made(MetricsSpec(basic_auth=auth), folder)
    assert found.admits(authorization) == expected


def test_without_settings_anyone_may(folder: Path) -> None:
    assert made(MetricsSpec(), folder).admits("")
    assert made(MetricsSpec(), folder).tls is None


def test_a_secret_is_not_shown(folder: Path) -> None:
    assert TOKEN not in repr(made(WITH_TOKEN, folder))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (MetricsSpec(token=Secret(variable="GONE")), r"metrics.token: \$GONE is not"),
        (MetricsSpec(token=Secret(variable="EMPTY")), r"\$EMPTY is empty"),
        (MetricsSpec(token=Secret(file="gone")), "gone: no such file"),
        (MetricsSpec(token=Secret(file="empty")), "empty is empty"),
        (MetricsSpec(tls=Tls(certificate="gone", key="server.key")), "gone: there is"),
        (MetricsSpec(tls=Tls(certificate="server.pem", key="other.key")), "mismatch"),
        (MetricsSpec(tls=Tls(certificate="password", key="server.key")), "cannot be"),
        (
            MetricsSpec(tls=Tls(certificate="server.pem", key="locked.key")),
            "a password",
        ),
        (
            MetricsSpec(
                tls=Tls(certificate="server.pem", key="server.key", client_ca="empty")
            ),
            "client_ca",
        ),
    ],
)
def test_what_cannot_be_read_is_one_plain_error(
    spec: MetricsSpec, said: str, folder: Path
) -> None:
    with pytest.raises(ProtectionError, match=said):
        made(spec, folder)


@pytest.fixture
def secured(folder: Path) -> Iterator[metrics.Exporter]:
    """An exporter with TLS and a token."""
    spec = MetricsSpec(tls=HTTPS.tls, token=WITH_TOKEN.token)
    state = replay(scenarios.whole())
    exporter = metrics.start(
        "127.0.0.1", 0, lambda: state, protection=made(spec, folder)
    )
    yield exporter
    exporter.close()


def get(
    url: str, folder: Path, authorization: str = "", client: str = ""
) -> tuple[int, Any, str]:
    """Status, headers, body."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    request = urllib.request.Request(url, headers={"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def test_a_scrape_over_tls_with_a_token(
    secured: metrics.Exporter, folder: Path
) -> None:
    assert secured.url.startswith("https://")
    status, _, body = get(secured.url, folder, f"Bearer {TOKEN}")
    assert status == 200
    assert "oomrun_run_state" in body


@pytest.mark.parametrize("authorization", ["", "Bearer wrong"])
def test_a_scrape_without_the_token_learns_nothing(
    secured: metrics.Exporter, folder: Path, authorization: str
) -> None:
    status, headers, body = get(secured.url, folder, authorization)
    assert (status, body) == (401, "")
    assert headers["WWW-Authenticate"] == 'Bearer realm="oomrun"'
    assert not secured.linger(1000)  # a refused scrape has seen nothing
    assert get(secured.url.replace("/metrics", "/healthz"), folder)[0] == 200


def test_plain_http_gets_no_answer(secured: metrics.Exporter, folder: Path) -> None:
    with socket.create_connection(secured.address, timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        said = b""
        try:
            while part := client.recv(4096):
                said += part
        except ConnectionResetError:
            pass
    assert b"oomrun" not in said
    assert get(secured.url, folder, f"Bearer {TOKEN}")[0] == 200


def test_silent_clients_do_not_hold_others_up(
    secured: metrics.Exporter, folder: Path
) -> None:
    """None of them begins the handshake; one after the other they would take 50 s."""
    silent = [socket.create_connection(secured.address) for _ in range(10)]
    assert get(secured.url, folder, f"Bearer {TOKEN}")[0] == 200
    for client in silent:
        client.close()


def test_clients_with_certificates_only(folder: Path) -> None:
    tls = Tls(certificate="server.pem", key="server.key", client_ca="ca.pem")
    state = replay(scenarios.whole())
    who = made(MetricsSpec(tls=tls), folder)
    with metrics.start("127.0.0.1", 0, lambda: state, protection=who) as exporter:
        assert get(exporter.url, folder, client="client")[0] == 200
        with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|EOF"):
            get(exporter.url, folder)


def job(text: str) -> str:
    return f"name: x\nscript: t.py\nmetrics: {{{text}}}\n"


def test_the_job_file_says_where_secrets_are() -> None:
    text = job(
        "tls: {certificate: a.pem, key: a.key, client_ca: c.pem}, "
        "basic_auth: {user: me, password: {env: OOMRUN_SECRET}}, "
        "textfile: x.prom, pushgateway: 'http://g:9091', port_taken: error"
    )
    found = jobfile.load(text, filename="job.yaml", environment={}).metrics
    assert found == MetricsSpec(
        tls=Tls(certificate="a.pem", key="a.key", client_ca="c.pem"),
        basic_auth=BasicAuth(user="me", password=Secret(variable="OOMRUN_SECRET")),
        textfile="x.prom",
        pushgateway="http://g:9091",
        port_taken="error",
    )
    found = jobfile.load(job("token: {file: t}"), filename="j", environment={}).metrics
    assert found.token == Secret(file="t")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port_taken: maybe", "expected next or error"),
        ("token: {}", "expected one of the keys file and env, got none"),
        ("token: {file: a, env: B}", "expected one of the keys file and env, got 2"),
        ("token: secret", "expected a mapping such as {file: PATH}"),
        (
            "basic_auth: {user: a, password: {}}",
            "expected one of the keys file and env, got none",
        ),
        ("basic_auth: {user: a}", "password"),
        ("basic_auth: {user: 'a:b', password: {file: x}}", "without a colon"),
        (
            "token: {file: a}, basic_auth: {user: a, password: {file: b}}",
            "exclude each other",
        ),
        ("tls: {certificate: a}", "key"),
        ("listen: none, token: {file: a}", "metrics.token is for metrics.listen"),
        ("listen: none, tls: {certificate: a, key: b}", "metrics.tls is for metrics"),
        ("textfile: /var/lib/oomrun.txt", "expected a name that ends in .prom"),
        ("pushgateway: 'http://me:secret@gateway'", "without user and password"),
    ],
)
def test_a_job_file_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        jobfile.load(job(text), filename="job.yaml", environment={})
    (problem,) = refused.value.problems
    assert said in f"{problem.message} {problem.hint}"


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_textfile_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "oomrun.prom"
    state = replay(scenarios.opening())
    with handing_over.Textfile(path, lambda: state):
        while not path.exists():
            time.sleep(0.01)
        first = families(path.read_text())
        state = replay(scenarios.whole())
    last = families(path.read_text())
    assert [s.value for s in first["oomrun_step"].samples] == [5]
    assert [s.value for s in last["oomrun_step"].samples] == [100]
    assert [entry.name for entry in tmp_path.iterdir()] == ["oomrun.prom"]


def test_a_textfile_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = replay(scenarios.whole())
    with (
        caplog.at_level(logging.WARNING),
        handing_over.Textfile(tmp_path / "no" / "folder" / "x.prom", lambda: state),
    ):
        pass
    (record,) = caplog.records
    assert "x.prom: no such file" in record.getMessage()


class Gateway(http.server.BaseHTTPRequestHandler):
    """Keeps what it is told, as a Pushgateway does."""

    told: list[tuple[str, str, str]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.told.append((self.command, self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_the_end_is_pushed_once() -> None:
    told: list[tuple[str, str, str]] = []
    handler = type("Handler", (Gateway,), {"told": told})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        server.timeout = 60
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        handing_over.push(url, replay(scenarios.whole()))
        thread.join()
    ((method, path, body),) = told
    assert (method, path) == ("PUT", "/metrics/job/oomrun/run/digits")
    state = families(body)["oomrun_run_state"]
    on = [s.labels["oomrun_run_state"] for s in state.samples if s.value]
    assert on == ["completed"]


def test_a_gateway_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        handing_over.push(
            f"http://127.0.0.1:{taken.getsockname()[1]}", replay(scenarios.whole())
        )
    (record,) = caplog.records
    assert "could not be pushed" in record.getMessage()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("token={env: NOT_SET_HERE}", "token: $NOT_SET_HERE is not set"),
        ("tls={certificate: a, key: b}", "tls: a: there is no such file"),
    ],
)
def test_no_run_starts_without_its_secrets(
    setting: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "t.py").touch()
    (tmp_path / "job.yaml").write_text("name: x\nscript: t.py\ndevices: cpu\n")
    done = subprocess.run(
        [sys.executable, "-m", "oomrun", "job.yaml", "--set", f"metrics.{setting}"],
        cwd=tmp_path, text=True, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (4, f"oomrun: metrics.{said}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("port_taken", ["next", "error"])
def test_what_a_taken_port_means_is_the_job_file_s_to_say(
    port_taken: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "job.yaml").write_text(
            "name: x\ncommand: [sh, -c, exit]\ndevices: cpu\n"
            f'metrics: {{listen: "127.0.0.1:{port}", port_taken: {port_taken}}}\n'
        )
        done = subprocess.run(
            [sys.executable, "-m", "oomrun", "job.yaml"],
            cwd=tmp_path, text=True, capture_output=True,
        )  # fmt: skip
    if port_taken == "error":
        assert done.returncode == 4
        assert done.stderr.startswith("oomrun: metrics cannot be served at 127.0.0.1:")
        assert not (tmp_path / "runs").exists()
    else:
        assert done.returncode == 0
        assert f"oomrun: port {port} is taken; metrics are at http:" in done.stderr
