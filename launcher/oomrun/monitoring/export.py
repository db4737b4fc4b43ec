"""Dashboards and rules in the forms that Grafana and Prometheus are given them.

Covers: files by name, and one stream of all. Does not cover: writing them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from oomrun.monitoring import control_board, fleet_board, memory_board
from oomrun.monitoring.alerts import rules
from oomrun.monitoring.panels import Board

__all__ = ["BOARDS", "FORMATS", "files", "stream"]

BOARDS: tuple[Board, ...] = (
    memory_board.BOARD, control_board.BOARD, fleet_board.BOARD,
)  # fmt: skip
#: json: Grafana's and Prometheus's own files; configmap: for a Grafana with the
#: dashboard sidecar; operator: for grafana-operator and prometheus-operator.
FORMATS = ("json", "configmap", "operator")
_LABELS = {"app.kubernetes.io/name": "oomrun", "app.kubernetes.io/part-of": "oomrun"}


def files(form: str) -> dict[str, str]:
    """Content by file name, in one of ``FORMATS``."""
    if form == "json":
        return {
            **{f"{board.uid}.json": _board_text(board) for board in BOARDS},
            "oomrun-rules.yaml": _yaml(rules()),
        }
    return {
        f"{body['metadata']['name']}.yaml": _yaml(body) for body in _manifests(form)
    }


def stream(form: str) -> str:
    """The same as one text: a JSON object, or YAML documents for ``kubectl apply``."""
    if form == "json":
        boards = [board.to_json() for board in BOARDS]
        return json.dumps({"dashboards": boards, "rules": rules()}, indent=2) + "\n"
    return "---\n".join(_yaml(body) for body in _manifests(form))


def _manifests(form: str) -> list[dict[str, Any]]:
    make_board, make_rules = {
        "configmap": (_board_configmap, _rules_configmap),
        "operator": (_grafana_dashboard, _prometheus_rule),
    }[form]
    return [*map(make_board, BOARDS), make_rules()]


def _board_configmap(board: Board) -> dict[str, Any]:
    body = _object("v1", "ConfigMap", board.uid, {"grafana_dashboard": "1"})
    body["metadata"]["annotations"] = {"grafana_folder": "oomrun"}
    return {**body, "data": {f"{board.uid}.json": _board_text(board)}}


def _rules_configmap() -> dict[str, Any]:
    body = _object("v1", "ConfigMap", "oomrun-rules", {})
    return {**body, "data": {"oomrun-rules.yaml": _yaml(rules())}}


def _grafana_dashboard(board: Board) -> dict[str, Any]:
    kind = "GrafanaDashboard"
    return {
        **_object("grafana.integreatly.org/v1beta1", kind, board.uid, {}),
        "spec": {
            "folder": "oomrun",
            "instanceSelector": {"matchLabels": {"dashboards": "grafana"}},
            "json": _board_text(board),
        },
    }


def _prometheus_rule() -> dict[str, Any]:
    body = _object("monitoring.coreos.com/v1", "PrometheusRule", "oomrun-rules", {})
    return {**body, "spec": rules()}


def _object(
    version: str, kind: str, name: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": {**_LABELS, **labels}},
    }


def _board_text(board: Board) -> str:
    return json.dumps(board.to_json(), indent=2) + "\n"


class _Dumper(yaml.SafeDumper):
    """Writes texts of many lines as they are, and every mapping in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _yaml(body: Mapping[str, Any]) -> str:
    text: str = yaml.dump(
        body, Dumper=_Dumper, sort_keys=False, width=88, allow_unicode=True
    )
    return text
