"""The dashboards and alert rules: what is committed, and whether Grafana takes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from oomrun.cli import main
from oomrun.metrics.catalogue import FAMILIES, MACHINE_FAMILIES
from oomrun.monitoring import export
from oomrun.monitoring.alerts import ALERTS, RECORDED

ROOT = Path(__file__).parents[2]
BOARDS = {board.uid: board.to_json() for board in export.BOARDS}
#: Of other exporters, which the boards join with.
OTHERS = {"DCGM_FI_DEV_FB_USED", "nvidia_smi_memory_used_bytes"}
MACHINES = {family.name for family in MACHINE_FAMILIES}
SETTINGS = ("batch.micro.max", "checkpoint.", "memory.", "SIGTERM", "oomrun status")


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show something."""
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


ALL_PANELS = [
    pytest.param(panel, id=f"{uid} {panel['title']}")
    for uid, board in BOARDS.items()
    for panel in panels(board)
]


def expressions() -> Iterator[str]:
    """Every query of every panel, annotation, variable and alert."""
    for board in BOARDS.values():
        for panel in panels(board):
            yield from (target["expr"] for target in panel["targets"])
        yield from (mark["expr"] for mark in board["annotations"]["list"])
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield variable["definition"]
    yield from (alert.expr for alert in ALERTS)


def exported_names() -> set[str]:
    """The names of all series that a scrape may have."""
    names = {"oomrun_build_info"}
    for family in (*FAMILIES, *MACHINE_FAMILIES):
        if family.type == "histogram":
            names |= {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}
        else:
            names.add(family.name)
    return names


@pytest.mark.parametrize("form", export.FORMATS)
def test_what_is_committed_is_what_is_made(form: str) -> None:
    folder = ROOT / "k8s" / "monitoring" / form
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    assert committed == export.files(form), (
        f"oomrun monitoring export --format {form} --output k8s/monitoring/{form}"
    )


def through_grafana_s_model(board: dict[str, Any]) -> Any:
    """The board, read and written by Grafana's own software kit."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


# The kit says to prefer the newer form of boards, which older Grafanas do not load.
old_form = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2")


@old_form
@pytest.mark.parametrize("uid", BOARDS)
def test_grafana_s_own_model_knows_every_key(uid: str) -> None:
    """It drops keys that it does not know, without a word."""
    board = json.loads(json.dumps(BOARDS[uid]))
    assert list(lost(BOARDS[uid], through_grafana_s_model(board), uid)) == []


@old_form
def test_a_misspelt_key_would_be_found() -> None:
    board = json.loads(json.dumps(BOARDS["oomrun-control"]))
    panel = board["panels"][1]
    panel["descriptionn"] = panel["targets"][0]["exprr"] = "x"
    panel["options"]["legendd"] = panel["fieldConfig"]["defaults"]["custom"]["x"] = 1
    found = list(lost(board, through_grafana_s_model(board), ""))
    assert {text.rpartition(".")[2] for text in found} == {
        "descriptionn is missing", "exprr is missing", "x is missing",
        "legendd is missing",
    }  # fmt: skip


def lost(sent: Any, back: Any, path: str) -> Iterator[str]:
    """Where ``back`` lacks a key that ``sent`` has, or has another value for it."""
    if isinstance(sent, dict) and isinstance(back, dict):
        for key, value in sent.items():
            if value is None:
                continue
            if key not in back:
                yield f"{path}.{key} is missing"
            else:
                yield from lost(value, back[key], f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(back, list):
        if len(sent) != len(back):
            yield f"{path} has {len(back)} items of {len(sent)}"
        for number, (one, other) in enumerate(zip(sent, back, strict=False)):
            yield from lost(one, other, f"{path}[{number}]")
    elif sent != back:
        yield f"{path} is {back!r}, was {sent!r}"


@pytest.mark.parametrize("uid", BOARDS)
def test_every_panel_has_a_place_of_its_own(uid: str) -> None:
    board = BOARDS[uid]
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert place["w"] > 0
        assert place["h"] > 0
    for one, other in combinations(board["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), one["title"]


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two places share a cell."""
    return (
        one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]
    )  # fmt: skip


@pytest.mark.parametrize("panel", ALL_PANELS)
def test_every_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] not in ("graph", "singlestat")  # gone from Grafana
    assert panel["targets"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"


def test_boards_are_found_by_a_name_of_their_own() -> None:
    assert len(BOARDS) == 3
    for board in BOARDS.values():
        assert board["id"] is None
        assert len(board["uid"]) <= 40
        assert not board["editable"]
        assert board["templating"]["list"][0]["type"] == "datasource"
        assert "__inputs" not in board


def test_counters_are_only_read_by_their_increase() -> None:
    families = (*FAMILIES, *MACHINE_FAMILIES)
    counters = [f.name for f in families if f.type == "counter"]
    for expr in expressions():
        for name in counters:
            for found in re.finditer(rf"\b{name}\b", expr):
                before = expr[: found.start()]
                assert before.endswith(("increase(", "rate(")), expr


def test_boards_filter_by_what_was_chosen() -> None:
    for uid in ("oomrun-memory", "oomrun-control"):
        for panel in panels(BOARDS[uid]):
            for target in panel["targets"]:
                names = set(re.findall(r"\boomrun_\w+(?!\w|=)(?!.?=)", target["expr"]))
                # A machine's metrics have no run: they are joined with one that has.
                assert names - MACHINES, target["expr"]
                for name in names - MACHINES:
                    assert f'{name}{{run=~"$run"' in target["expr"], target["expr"]


def test_every_metric_that_is_asked_for_exists() -> None:
    families = (*FAMILIES, *MACHINE_FAMILIES)
    labels = {label for family in families for label in family.labels}
    for expr in expressions():
        asked = set(re.findall(r"\b(?:oomrun|DCGM|nvidia)_\w+", expr))
        unknown = asked - exported_names() - OTHERS - labels
        assert not unknown, expr


def test_every_metric_that_is_exported_is_asked_for() -> None:
    text = " ".join(expressions())
    for family in (*FAMILIES, *MACHINE_FAMILIES):
        assert re.search(rf"\b{family.name}(_bucket|_sum|_count)?\b", text), family.name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_says_what_to_do(alert: Any) -> None:
    assert alert.name.startswith("Oomrun")
    assert alert.severity in ("info", "warning", "critical")
    assert re.search(r"\$labels\.(run|instance)\b", alert.summary)
    assert any(word in alert.action for word in SETTINGS) or "same command" in (
        alert.action
    ), alert.action
    assert alert.board in BOARDS


def test_a_config_map_holds_its_board() -> None:
    for name, text in export.files("configmap").items():
        body = yaml.safe_load(text)
        assert (body["kind"], body["metadata"]["name"]) == (
            "ConfigMap",
            name.removesuffix(".yaml"),
        )
        assert len(text) < 2**20
        (content,) = body["data"].values()
        if name != "oomrun-rules.yaml":
            assert body["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert json.loads(content) in BOARDS.values()
        else:
            assert yaml.safe_load(content)["groups"][0]["name"] == "oomrun"


def test_the_operators_get_the_same() -> None:
    files = export.files("operator")
    for uid, board in BOARDS.items():
        assert json.loads(yaml.safe_load(files[f"{uid}.yaml"])["spec"]["json"]) == board
    rule = yaml.safe_load(files["oomrun-rules.yaml"])
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(export.files("json")["oomrun-rules.yaml"])


@pytest.mark.parametrize("form", export.FORMATS)
def test_the_command_prints_all_or_writes_files(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitoring", "export", "--format", form]) == 0
    said = capsys.readouterr().out
    if form == "json":
        assert set(json.loads(said)) == {"dashboards", "rules"}
    else:
        assert len(list(yaml.safe_load_all(said))) == 4
    folder = tmp_path / "new" / "folder"
    words = ["monitoring", "export", "--format", form, "--output", str(folder)]
    assert main(words) == 0
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == export.files(form)
    said = capsys.readouterr().out
    assert said.splitlines() == [str(folder / name) for name in export.files(form)]


def test_a_folder_that_cannot_be_written_is_one_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "oomrun", "monitoring", "export", "--output", "file"],
        cwd=tmp_path, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.startswith("oomrun: file")
    assert done.stderr.count("\n") == 1


WORKSTATION = ROOT / "monitoring"


def mounts(service: str) -> dict[str, Path]:
    """What a container of the workstation's compose file sees: its path to ours."""
    compose = yaml.safe_load((WORKSTATION / "docker-compose.yml").read_text())
    found = {}
    for mount in compose["services"][service]["volumes"]:
        ours, theirs, *_ = mount.split(":")
        if ours.startswith("."):
            found[theirs] = (WORKSTATION / ours).resolve()
        else:
            assert ours in compose["volumes"]
    return found


def test_the_workstation_s_containers_find_their_files() -> None:
    for service in ("prometheus", "grafana"):
        for ours in mounts(service).values():
            assert ours.exists(), ours
    config = yaml.safe_load((WORKSTATION / "prometheus.yml").read_text())
    (theirs,) = (path for path in mounts("prometheus") if path.endswith(".yml"))
    for rules in config["rule_files"]:
        folder, name = os.path.split(os.path.normpath(Path(theirs).parent / rules))
        assert (mounts("prometheus")[folder] / name).exists()
    (provider,) = yaml.safe_load(
        (WORKSTATION / "grafana/dashboards/oomrun.yaml").read_text()
    )["providers"]
    boards = mounts("grafana")[provider["options"]["path"]]
    assert {path.stem for path in boards.glob("*.json")} == set(BOARDS)


def test_the_workstation_listens_to_itself_alone() -> None:
    compose = yaml.safe_load((WORKSTATION / "docker-compose.yml").read_text())
    services = compose["services"]
    address = "--web.listen-address=127.0.0.1:9090"
    assert address in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    (source,) = yaml.safe_load(
        (WORKSTATION / "grafana/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"


@pytest.mark.skipif(
    not shutil.which("promtool"),
    reason="promtool is not installed (apt-get install prometheus)",
)
def test_prometheus_takes_the_workstation_s_config() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(WORKSTATION / "prometheus.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in done.stdout
