"""``oomrun monitoring export``: dashboards and alert rules, printed or written.

Covers: options and files. Does not cover: what is in them (``oomrun.monitoring``).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "export"]

_FORMATS = ("json", "configmap", "operator")


def add_parser(subparsers: Any) -> None:
    """Adds ``monitoring`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "monitoring",
        help="print or write Grafana dashboards and Prometheus alert rules",
        usage="oomrun monitoring export [options]",
        description="Print or write three Grafana dashboards and the alert rules.",
        epilog="docs/monitoring.md says where they go.",
    )
    parser.add_argument("action", choices=("export",), metavar="export", help="do it")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="json",
        help="json: files of Grafana and Prometheus (default); configmap: for the "
        "dashboard sidecar; operator: for grafana-operator and prometheus-operator",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="write one file each into this folder, instead of printing all as one",
    )
    parser.set_defaults(handler=export)


def export(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from oomrun import monitoring
    from oomrun.rundir import write_atomically

    if args.output is None:
        print(monitoring.stream(args.format), end="")
        return 0
    for name, text in monitoring.files(args.format).items():
        write_atomically(args.output / name, text.encode())
        print(args.output / name)
    return 0
