"""``oomrun monitor``: one metrics endpoint for all runs of a machine, and its devices.

Covers: options, serving until it is stopped. Does not cover: which runs there are
(``monitored.py``), what is measured (``oomrun.metrics``).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from oomrun.cli import option_values
from oomrun.core.spec import BasicAuth, Listen, MetricsSpec, Secret, Tls

__all__ = ["DEFAULT_LISTEN", "add_parser", "monitor"]

#: Below the port of runs, which take the next ones.
DEFAULT_LISTEN = "127.0.0.1:9463"


def add_parser(subparsers: Any) -> None:
    """Adds ``monitor`` to the command line."""
    from oomrun.cli.run_command import duration

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "monitor",
        help="serve the metrics of all runs of this machine, and of its devices",
        description="Serve the metrics of all runs of this machine, those that ended a "
        "while ago too, and of its devices, until it is stopped. Scrape it instead of "
        "the runs' own endpoints.",
        epilog="docs/monitoring.md tells more.",
    )
    parser.add_argument(
        "--listen",
        type=_listen,
        default=DEFAULT_LISTEN,
        metavar="ADDRESS",
        help=f"where (default: {DEFAULT_LISTEN}); port 0 takes any free one",
    )
    parser.add_argument(
        "--keep",
        type=duration,
        default=900.0,
        metavar="TIME",
        help="how long a run is shown after its end (default: 15min)",
    )
    parser.add_argument(
        "--all-users",
        action="store_true",
        help="show other users' runs too, where their files may be read",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the metrics, once; serve nothing"
    )
    parser.add_argument("--certificate", metavar="FILE", help="serve https: PEM")
    parser.add_argument("--key", metavar="FILE", help="the certificate's key, PEM")
    parser.add_argument(
        "--client-ca", metavar="FILE", help="ask clients for certificates of this root"
    )
    parser.add_argument(
        "--token", metavar="FILE", help="answer scrapes with this bearer token alone"
    )
    parser.add_argument(
        "--user", metavar="NAME", help="the same with a user and --password"
    )
    parser.add_argument("--password", metavar="FILE", help="the user's password")
    parser.set_defaults(handler=monitor)


def monitor(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from prometheus_client import generate_latest

    from oomrun import metrics
    from oomrun.cli.monitored import Monitored
    from oomrun.devices.sampling import Sampling
    from oomrun.known_runs import folders_of
    from oomrun.metrics.catalogue import registry_of
    from oomrun.metrics.protection import protection
    from oomrun.stops import Stops

    logging.basicConfig(format="oomrun: %(message)s", level=logging.WARNING)
    wrong = _wrong(args)
    if wrong:
        print(f"oomrun: {wrong}", file=sys.stderr)
        return 2
    who = protection(_settings(args), folder=Path(), environment=os.environ)
    runs = Monitored(folders_of(os.environ), keep_s=args.keep, all_users=args.all_users)
    with contextlib.ExitStack() as stack:
        sampling = stack.enter_context(Sampling(patience_s=10.0 if args.once else 1.0))
        registry = registry_of(runs.states, sampling)
        if args.once:
            print(generate_latest(registry).decode(), end="")
            return 0
        stops = Stops()
        stack.callback(stops.close)
        stack.enter_context(stops.installed())
        exporter = metrics.serve(
            args.listen.host,
            args.listen.port,
            registry,
            readiness=lambda: "ready",
            port_taken="error",
            protection=who,
        )
        stack.callback(exporter.close)
        print(f"oomrun: metrics are at {exporter.url}", file=sys.stderr, flush=True)
        while not stops.requested:
            stops.sleep(3600)
    return 0


def _listen(text: str) -> Listen:
    from oomrun.core.jobfile.values import LISTEN

    what = f"address such as {DEFAULT_LISTEN}"
    found = option_values.read(text, LISTEN.check, what)
    assert isinstance(found, Listen)
    return found


def _wrong(args: argparse.Namespace) -> str:
    """What is wrong with the options together, or ""."""
    if (args.certificate is None) != (args.key is None):
        return "--certificate and --key go together"
    if args.client_ca and not args.certificate:
        return "--client-ca needs --certificate and --key"
    if (args.user is None) != (args.password is None):
        return "--user and --password go together"
    if args.user and ":" in args.user:
        return "--user: a user name has no colon"
    if args.token and args.user:
        return "either --token or --user"
    return ""


def _settings(args: argparse.Namespace) -> MetricsSpec:
    """The options in the words of a job file's ``metrics``."""
    tls = None
    if args.certificate:
        tls = Tls(certificate=args.certificate, key=args.key, client_ca=args.client_ca)
    auth = None
    if args.user:
        auth = BasicAuth(user=args.user, password=Secret(file=args.password))
    token = Secret(file=args.token) if args.token else None
    return MetricsSpec(tls=tls, token=token, basic_auth=auth)
